//! The layer `patterns` of disks without a guest.

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::json;

use crate::process::Daemon;

const CONFIGURATION: &str = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";

#[test]
fn the_layer_comes_and_goes_while_a_disk_is_in_use() {
    let daemon = Daemon::start(CONFIGURATION);
    let client = daemon.client();
    assert!(client.patterns(None).unwrap().disks.is_empty());
    let refused = client.patterns(Some("a")).unwrap_err().to_string();
    assert!(refused.contains("no layer `patterns`"), "{refused}");
    assert!(client.patterns(Some("b")).is_err());
    let wrong = |options: serde_json::Value| {
        let layer = LayerDefinition::new("patterns", options);
        let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
        client.change_disk("a", &change).map(drop)
    };
    for options in [json!({ "memory": "1K" }), json!({ "alarm_files": 0 }), json!({ "what": 1 })] {
        assert!(wrong(options.clone()).is_err(), "{options}");
    }
    wrong(json!({ "memory": "64K", "alarm_time": "5s" })).unwrap();
    let found = client.patterns(Some("a")).unwrap();
    assert_eq!((found.disks.len(), found.disks[0].disk.as_str()), (1, "a"));
    assert!(found.disks[0].memory_bytes > 64 << 10);
    let kinds: Vec<String> =
        client.disk("a").unwrap().layers.iter().map(|layer| layer.name.clone()).collect();
    assert_eq!(kinds, ["classify", "tap", "patterns"]);
    let remove = DiskChange { remove_layer: Some("patterns".into()), ..DiskChange::default() };
    client.change_disk("a", &remove).unwrap();
    assert!(client.patterns(None).unwrap().disks.is_empty());
    daemon.end();
}
