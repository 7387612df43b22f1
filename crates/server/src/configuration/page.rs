//! The tables of `docs/configuration.md` are made of the types that are read.

use std::fmt::Write as _;
use std::path::Path;

use fathom_control::{
    DiskDefinition, ListenerDefinition, ModelDefinition, TlsDefinition, VhostUserDefinition,
};
use fathom_options::{Key, Places, Problems, Section, Title, Written, fields};

use super::{
    CommandDefinition, DaemonOptions, LogDefinition, MetricDefinition, MonitorOptions,
    QueryDefinition, WebhookDefinition, layers,
};

/// What ends each part of the page that is made.
const END: &str = "<!-- end of what is made -->\n";

/// What is made of one type: its lines, after a check of them. `required` is TOML without which
/// the type cannot be read.
fn lines<T: Section + PartialEq + std::fmt::Debug>(required: &str, before: &str) -> String {
    let name = std::any::type_name::<T>();
    let documented: Vec<&str> = T::KEYS.iter().map(|key| key.name).collect();
    assert_eq!(documented, fields::<T>(), "the keys of {name}");
    let mut written = required.to_owned();
    for key in T::KEYS.iter().filter(|key| !key.default.is_empty()) {
        writeln!(written, "{} = {}", key.name, key.default).unwrap();
    }
    let written: toml::Table = written.parse().unwrap();
    let value = serde_json::to_value(written).unwrap();
    let (places, mut problems) = (Places::default(), Problems::default());
    let title = Title::Words(name);
    let written = Written { value: &value, title, path: "", places: &places, folder: None };
    let read = fathom_options::read::<T>(&written, &mut problems);
    assert_eq!((problems.0, read), (vec![], Some(T::default())), "the defaults of {name}");
    T::KEYS.iter().map(|key| line(before, key)).collect()
}

fn line(before: &str, key: &Key) -> String {
    let default = match key.default {
        "" => String::new(),
        default => format!("`{default}`"),
    };
    format!("| {before}`{}` | {default} | {} |\n", key.name, key.meaning)
}

fn section<T: Section + PartialEq + std::fmt::Debug>(required: &str) -> String {
    format!("| key | default | meaning |\n|---|---|---|\n{}", lines::<T>(required, ""))
}

fn actions() -> String {
    let mut made = "| kind | key | default | meaning |\n|---|---|---|---|\n".to_owned();
    made.push_str(&lines::<LogDefinition>("", "`log` | "));
    made.push_str(&lines::<MetricDefinition>("", "`metric` | "));
    made.push_str(&lines::<WebhookDefinition>("", "`webhook` | "));
    made.push_str(&lines::<CommandDefinition>("", "`command` | "));
    made
}

fn kinds() -> String {
    let mut made = String::new();
    for kind in layers::kinds() {
        writeln!(made, "- `{}` {}.", kind.name, kind.meaning).unwrap();
    }
    made.push_str("\n| kind | key | default | meaning |\n|---|---|---|---|\n");
    for kind in layers::kinds() {
        let before = format!("`{}` | ", kind.name);
        kind.keys.iter().for_each(|key| made.push_str(&line(&before, key)));
    }
    made
}

#[test]
fn the_page_is_made_of_the_types() {
    let parts = [
        ("[daemon]", section::<DaemonOptions>("")),
        ("[[disk]]", section::<DiskDefinition>("")),
        ("[disk.vhost_user]", section::<VhostUserDefinition>("")),
        ("the layers", kinds()),
        ("the models", section::<ModelDefinition>("kind = \"hdd\"\n")),
        ("[[nbd]]", section::<ListenerDefinition>("")),
        ("[nbd.tls]", section::<TlsDefinition>("")),
        ("[[query]]", section::<QueryDefinition>("")),
        ("the actions", actions()),
        ("[monitor]", section::<MonitorOptions>("")),
    ];
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let mut page = std::fs::read_to_string(&path).unwrap();
    let is_written = std::env::var_os("FATHOM_WRITE_DOCS").is_some();
    for (what, made) in parts {
        let begin = format!("<!-- {what}, made by the test `the_page_is_made_of_the_types` -->\n");
        let (before, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("no {begin:?}"));
        let (written, after) = rest.split_once(END).unwrap_or_else(|| panic!("no end of {what}"));
        if is_written {
            page = format!("{before}{begin}{made}{END}{after}");
        } else {
            assert_eq!(written, made, "{what}: FATHOM_WRITE_DOCS=1 writes the page");
        }
    }
    if is_written {
        std::fs::write(&path, page).unwrap();
    }
}
