//! The daemon accepts the examples of the pages and of the package.

use std::path::{Path, PathBuf};

use fathom_server::configuration;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The blocks of `page` that begin with ```` ```language ````.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let text = std::fs::read_to_string(repository().join(page)).unwrap();
    let mut blocks = Vec::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find(&format!("```{language}\n")) {
        let body = &rest[at + language.len() + 4..];
        let end = body.find("```").unwrap();
        blocks.push(body[..end].to_owned());
        rest = &body[end..];
    }
    assert!(!blocks.is_empty(), "{page} has no {language}");
    blocks
}

fn parse(text: &str) -> configuration::Configuration {
    configuration::parse(text, Path::new("/page.toml"))
        .unwrap_or_else(|problems| panic!("{problems}\n{text}"))
}

#[test]
fn the_examples_of_configurations_are_read() {
    for block in blocks("docs/configuration.md", "toml") {
        parse(&block);
    }
    let packaged = std::fs::read_to_string(repository().join("packaging/fathom.toml")).unwrap();
    let as_shipped = parse(&packaged);
    assert_eq!(as_shipped.disks.len(), 0);
    // The commented-out settings are valid too. A comment without a space after the `#` is a
    // setting.
    let all: String = packaged
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') => format!("{setting}\n"),
            _ => format!("{line}\n"),
        })
        .collect();
    let configuration = parse(&all);
    assert_eq!((configuration.disks.len(), configuration.listeners.len()), (1, 1));
    assert_eq!(configuration.count("query"), 1);
    configuration.check_sections().unwrap();
}

#[test]
fn the_packages_unit_lets_the_daemon_share_a_guest_with_a_pager() {
    let unit = std::fs::read_to_string(repository().join("packaging/fathom.service")).unwrap();
    let of = |key: &str| -> Vec<String> {
        let lines = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        lines.map(str::to_owned).collect()
    };
    // The file system is read-only for it, and a folder that is not there at its start stays so.
    assert_eq!(of("ProtectSystem"), ["strict"]);
    let folder = fathom_guest_memory::LEASE_FOLDER;
    assert_eq!(of("ReadWritePaths"), [format!("-{folder}")]);
    let parent = Path::new(folder).parent().unwrap().display();
    let made = format!("-+install -d -m 0711 {parent} {folder}");
    assert!(of("ExecStartPre").contains(&made), "{made}");
    // What makes a touch of a page that is away an error.
    let filters = of("SystemCallFilter");
    let allowed = filters.iter().rposition(|filter| filter == "userfaultfd").unwrap();
    let excluded = filters.iter().rposition(|filter| filter.starts_with('~'));
    assert!(excluded.is_none_or(|excluded| excluded < allowed), "{filters:?}");
    // Its programs may not be installed here.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fathom.service");
    std::fs::write(&path, unit.replace("/usr/local/bin/fathom", "/bin/true")).unwrap();
    let verified = std::process::Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(&path)
        .output();
    match verified {
        Err(error) => println!("Skipped: systemd-analyze: {error}"),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr);
            // Keys of later versions of systemd are ignored by this one.
            let wrong =
                |line: &&str| line.contains("fathom.service") && !line.contains("Unknown key");
            let wrong: Vec<&str> = text.lines().filter(wrong).collect();
            assert!(output.status.success() && wrong.is_empty(), "{wrong:?}");
        }
    }
}

#[test]
fn the_kept_queries_of_the_pages_can_be_kept() {
    for page in ["docs/queries.md", "docs/configuration.md"] {
        let mut count = 0;
        for block in blocks(page, "toml") {
            let configuration = parse(&block);
            configuration.check_sections().unwrap_or_else(|problems| panic!("{problems}\n{block}"));
            count += configuration.count("query");
        }
        assert!(count > 0, "{page} has no [[query]]");
    }
}

#[test]
fn the_examples_of_the_interface_are_its_types() {
    fn check<T: serde::de::DeserializeOwned + serde::Serialize>(name: &str) {
        for block in blocks("docs/control.md", &format!("json {name}")) {
            let value: T = serde_json::from_str(&block).unwrap_or_else(|e| panic!("{name}: {e}"));
            serde_json::to_string(&value).unwrap();
        }
    }
    check::<fathom_control::DiskDefinition>("DiskDefinition");
    check::<fathom_control::DiskChange>("DiskChange");
    check::<fathom_control::MoveRequest>("MoveRequest");
    check::<fathom_control::MoveStatus>("MoveStatus");
    check::<fathom_control::UnservedDisk>("UnservedDisk");
    check::<fathom_control::LogRequest>("LogRequest");
    check::<fathom_control::LogAnswer>("LogAnswer");
    check::<fathom_control::Statistics>("Statistics");
    check::<fathom_control::InsightStatus>("InsightStatus");
    check::<fathom_control::Problem>("Problem");
    check::<fathom_control::DeviceList>("DeviceList");
    check::<fathom_control::BackgroundList>("BackgroundList");
    check::<fathom_control::CacheReport>("CacheReport");
    check::<fathom_control::UsageReport>("UsageReport");
    check::<fathom_control::SlowReport>("SlowReport");
    check::<fathom_control::GuestList>("GuestList");
    check::<fathom_control::DirtyReport>("DirtyReport");
    check::<fathom_control::LeaseReport>("LeaseReport");
    check::<fathom_control::QueryList>("QueryList");
    check::<fathom_control::MonitorStatus>("MonitorStatus");
    check::<fathom_control::ErrorReply>("ErrorReply");
}
