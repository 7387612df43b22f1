//! The alerts for Prometheus and the dashboard for Grafana, in `packaging/`. They are made from the
//! tables of `docs/`, so that a metric or a kind of problem without its alert or panel fails here,
//! and Prometheus' own program reads them. No Grafana is available: that its page looks right was
//! not tried.

mod dashboard;
mod pages;
mod rules;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fathom_control::ProblemKind;

use crate::nbd::Nbd;
use crate::process::Daemon;
use crate::process::image;
use crate::store;

/// `promtool` of Debian's package, made available by `scripts/promtool`, or an installed one.
fn promtool() -> Option<PathBuf> {
    let unpacked = pages::path("target/promtool/promtool");
    let candidates = [unpacked, PathBuf::from("promtool")];
    let runs = |path: &PathBuf| Command::new(path).arg("--version").output().is_ok();
    let found = candidates.into_iter().find(runs);
    if found.is_none() {
        eprintln!("skipped: scripts/promtool has not been run, and promtool is not installed");
    }
    found
}

/// Runs promtool, which has to succeed, and returns what it prints.
fn prom(promtool: &Path, arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(promtool)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "promtool {arguments:?}: {text}");
    text
}

/// Holds a page of metrics to Prometheus' rules.
pub fn check_metrics(page: &str) {
    if let Some(promtool) = promtool() {
        let said = prom(&promtool, &["check", "metrics"], page);
        assert!(said.is_empty(), "{said}");
    }
}

#[test]
fn each_problem_has_its_alert_and_each_metric_its_panel() {
    let alerts = rules::alerts();
    let families = pages::families();
    let expressions: Vec<_> = alerts.iter().map(|alert| alert.expression.clone()).collect();
    let alerted: BTreeSet<_> = expressions.iter().flat_map(|text| dashboard::names(text)).collect();
    let made = dashboard::made(&families, |name| alerted.contains(name));
    let of_panels = dashboard::expressions(&made);
    let panelled: BTreeSet<_> = of_panels.iter().flat_map(|text| dashboard::names(text)).collect();

    // Neither names a metric that does not exist, and each metric has a place.
    for name in alerted.iter().chain(&panelled) {
        assert!(families.contains_key(name), "{name} is not in docs/metrics.md");
    }
    for (name, family) in &families {
        assert!(alerted.contains(name) || panelled.contains(name), "{name} has no place");
        let is_urgent = family.meaning.contains("worth an alert");
        assert!(!is_urgent || alerted.contains(name), "{name} is worth an alert and has none");
    }
    // What is known of problems is of those that there are.
    let known: BTreeSet<_> =
        ProblemKind::ALL.into_iter().map(|kind| kind.name().to_owned()).collect();
    assert_eq!(pages::meanings().into_keys().collect::<BTreeSet<_>>(), known);
    assert_eq!(pages::decisions().into_keys().collect::<BTreeSet<_>>(), known);
    let names: BTreeSet<_> = alerts.iter().map(|alert| &alert.name).collect();
    assert_eq!(names.len(), alerts.len(), "two alerts have the same name");
    for alert in &alerts {
        let severities = ["critical", "warning", "info"];
        assert!(
            severities.contains(&alert.severity.as_str()),
            "{}: {}",
            alert.name,
            alert.severity
        );
        assert!(!alert.summary.is_empty() && !alert.remedy.is_empty(), "{}", alert.name);
    }
    pages::hold(rules::FILE, &rules::file(&alerts));
    pages::hold(dashboard::FILE, &format!("{made:#}\n"));
    pages::hold_part("docs/metrics.md", "the alerts", |_| rules::table(&alerts));
}

#[test]
fn a_dashboard_has_what_grafana_needs() {
    let made: serde_json::Value = serde_json::from_str(&pages::read(dashboard::FILE)).unwrap();
    assert!(made["schemaVersion"].as_u64() >= Some(36) && made["uid"] == "fathom");
    let panels = made["panels"].as_array().unwrap();
    let inner = panels.iter().flat_map(|panel| panel["panels"].as_array().into_iter().flatten());
    let mut numbers = BTreeSet::new();
    let mut places = BTreeSet::new();
    for panel in panels.iter().chain(inner) {
        assert!(numbers.insert(panel["id"].as_u64().unwrap()), "{panel}");
        let place = &panel["gridPos"];
        let of = |name: &str| place[name].as_u64().unwrap();
        assert!(of("x") + of("w") <= 24 && of("h") > 0, "{panel}");
        assert!(places.insert((of("x"), of("y"))), "two panels are at {place}");
        assert!(!panel["title"].as_str().unwrap().is_empty());
        let targets = panel["targets"].as_array().map_or(0, Vec::len);
        assert_eq!(targets == 0, panel["type"] == "row", "{panel}");
    }
    // Each variable that an expression has is defined.
    let variables: BTreeSet<_> = made["templating"]["list"]
        .as_array()
        .unwrap()
        .iter()
        .map(|variable| variable["name"].as_str().unwrap().to_owned())
        .collect();
    for expression in dashboard::expressions(&made) {
        for used in expression.split('$').skip(1) {
            let end = used.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let used = &used[..end.unwrap_or(used.len())];
            assert!(used == "__rate_interval" || variables.contains(used), "{used}: {expression}");
        }
    }
}

#[test]
fn prometheus_reads_the_rules_and_each_expression() {
    let Some(promtool) = promtool() else { return };
    let file = pages::path(rules::FILE);
    let said = prom(&promtool, &["check", "rules", file.to_str().unwrap()], "");
    assert!(said.contains(&format!("{} rules found", rules::alerts().len())), "{said}");

    let made = serde_json::from_str(&pages::read(dashboard::FILE)).unwrap();
    let expressions = dashboard::expressions(&made);
    let mut text = "groups:\n- name: panels\n  rules:\n".to_owned();
    for (index, expression) in expressions.iter().enumerate() {
        let expression = expression.replace("$__rate_interval", "5m").replace('\'', "''");
        writeln!(text, "  - record: panel:{index}\n    expr: '{expression}'").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let panels = folder.path().join("panels.yml");
    std::fs::write(&panels, text).unwrap();
    let said = prom(&promtool, &["check", "rules", panels.to_str().unwrap()], "");
    assert!(said.contains(&format!("{} rules found", expressions.len())), "{said}");
}

#[test]
fn alerts_fire_when_they_have_to_and_not_otherwise() {
    let Some(promtool) = promtool() else { return };
    let cases = pages::path("crates/fathom/tests/daemon/alerts/cases.yml");
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(pages::path(rules::FILE), folder.path().join("fathom.rules.yml")).unwrap();
    let copy = folder.path().join("cases.yml");
    std::fs::copy(cases, &copy).unwrap();
    let said = prom(&promtool, &["test", "rules", copy.to_str().unwrap()], "");
    assert!(said.contains("SUCCESS"), "{said}");
    // The cases can fail: with another bound, one does.
    let rules = std::fs::read_to_string(folder.path().join("fathom.rules.yml")).unwrap();
    let other =
        rules.replace("fathom_layer_wal_size_bytes > 0.8", "fathom_layer_wal_size_bytes > 0.99");
    assert_ne!(rules, other);
    std::fs::write(folder.path().join("fathom.rules.yml"), other).unwrap();
    let failed = Command::new(&promtool).args(["test", "rules"]).arg(&copy).output().unwrap();
    assert!(!failed.status.success());
}

#[test]
fn the_page_has_the_figures_of_layers_and_stores_of_a_real_daemon() {
    let folder = store::prepared();
    image(folder.path(), "a.img", 8 << 20);
    image(folder.path(), "b.img", 8 << 20);
    let layers = "layers = [{ kind = \"limit\", total_iops_sec = 100000 }, { kind = \"schedule\" }, \
                  { kind = \"patterns\" }, { kind = \"lifetimes\" }, { kind = \"swap-watch\" }, \
                  { kind = \"cache\", size = \"4M\" }, { kind = \"wal\", log = \"a.log\", size = \"1M\" }]\n";
    let model = "[[disk]]\nname = \"m\"\nmemory = \"1M\"\nmodel = { kind = \"hdd\" }\n";
    let offload = "[[disk]]\nname = \"o\"\nimage = \"b.img\"\n\
                   layers = [{ kind = \"offload\", log = \"b.log\", size = \"1M\" }]\n";
    let volume = "[[disk]]\nname = \"v\"\nstore = \"pool\"\nvolume = \"one\"\n";
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"w\"\nimage = \"a.img\"\n{layers}{model}{offload}{volume}"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let client = daemon.client();
    let served = || ["w", "m", "o", "v"].iter().all(|disk| client.disk(disk).is_ok());
    daemon.until("the disks are served", served);
    Nbd::connect(&daemon.path("nbd.sock"), "w").write(0, &[1; 512]);
    let text = client.metrics().unwrap();
    check_metrics(&text);

    let mut found = std::collections::BTreeMap::new();
    let mut help = "";
    for line in text.lines() {
        if let Some(line) = line.strip_prefix("# HELP ") {
            help = line.split_once(' ').unwrap().1;
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' '))
        {
            let labels = match &name[..13.min(name.len())] {
                "fathom_layer_" => "disk, vm",
                "fathom_store_" => "disk, vm, layer",
                _ => continue,
            };
            found.insert(name.to_owned(), format!("| `{name}` | {kind} | {labels} | {help} |\n"));
        }
    }
    for part in
        ["layer_limit", "layer_offload", "layer_wal", "layer_swap_watch", "store_store_pool"]
    {
        let name = format!("fathom_{part}_");
        assert!(found.keys().any(|family| family.starts_with(&name)), "{name}: {found:?}");
    }
    // Layers and stores that this daemon has not keep their rows.
    pages::hold_part("docs/metrics.md", "the figures", |written| {
        let of_others = written.lines().filter(|line| line.starts_with("| `")).filter_map(|line| {
            let name = line.split('`').nth(1)?;
            let kind = |name: &str| name.split('_').take(3).collect::<Vec<_>>().join("_");
            let is_here = found.keys().any(|family| kind(family) == kind(name));
            (!is_here).then(|| (name.to_owned(), format!("{line}\n")))
        });
        let mut rows: std::collections::BTreeMap<_, _> = of_others.collect();
        rows.extend(found.clone());
        let rows: String = rows.into_values().collect();
        format!("| metric | type | labels | meaning |\n|---|---|---|---|\n{rows}")
    });
}
