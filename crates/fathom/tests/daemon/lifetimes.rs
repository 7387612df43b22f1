//! The layer `lifetimes` of disks without a guest.

use fathom_control::{DiskChange, GroupedBy, LayerDefinition};
use serde_json::json;

use crate::nbd::Nbd;
use crate::process::Daemon;

const CONFIGURATION: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
    layers = [{ kind = \"lifetimes\", memory = \"64K\" }]\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n";

#[test]
fn blocks_without_files_live_until_they_are_written_again() {
    let daemon = Daemon::start(CONFIGURATION);
    let client = daemon.client();
    let refused = client.lifetimes(Some("b")).unwrap_err().to_string();
    assert!(refused.contains("no layer `lifetimes`"), "{refused}");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[1; 16_384]);
    nbd.write(4096, &[2; 4096]);
    nbd.write(8192, &[3; 512]);
    let found = client.lifetimes(None).unwrap();
    assert_eq!((found.disks.len(), found.disks[0].disk.as_str()), (1, "a"));
    let disk = &found.disks[0];
    let whole = &disk.groups[0];
    assert_eq!(whole.by, GroupedBy::Disk);
    assert_eq!((whole.born_bytes, whole.overwritten_bytes), (6 * 4096, 2 * 4096));
    assert_eq!((whole.lifetimes.count(), whole.naive_lifetimes.count()), (8192, 8192));
    assert_eq!((disk.living_bytes, disk.files), (4 * 4096, 0));
    assert_eq!((disk.groups[1].by, disk.groups[1].name.as_str()), (GroupedBy::Kind, "unknown"));
    let wrong = |options: serde_json::Value| {
        let layer = LayerDefinition::new("lifetimes", options);
        let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
        client.change_disk("b", &change).map(drop)
    };
    for options in [json!({ "memory": "1K" }), json!({ "memory": "8G" }), json!({ "what": 1 })] {
        assert!(wrong(options.clone()).is_err(), "{options}");
    }
    wrong(json!({})).unwrap();
    assert_eq!(client.lifetimes(None).unwrap().disks.len(), 2);
    let remove = DiskChange { remove_layer: Some("lifetimes".into()), ..DiskChange::default() };
    client.change_disk("a", &remove).unwrap();
    assert!(client.lifetimes(Some("a")).is_err());
    daemon.end();
}
