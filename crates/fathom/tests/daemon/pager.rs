//! The layer `swap-watch` of disks without a guest, and the report without guests.

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::json;

use crate::nbd::Nbd;
use crate::process::Daemon;

const CONFIGURATION: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
    layers = [{ kind = \"swap-watch\" }]\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n";

#[test]
fn a_disk_without_a_guest_has_no_pages() {
    let daemon = Daemon::start(CONFIGURATION);
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[1; 16_384]);
    assert_eq!(nbd.read(4096, 4096), [1; 4096]);
    assert!(client.pager(None).unwrap().guests.is_empty());
    let refused = client.pager(Some("a")).unwrap_err().to_string();
    assert!(refused.contains("no guest is called \"a\""), "{refused}");
    let figure = |name| client.disk("a").unwrap().figure("swap-watch", name);
    for name in ["examined_requests_total", "stale_read_bytes_total", "failures_total"] {
        assert_eq!(figure(name), Some(0), "{name}");
    }
    let add = |options: serde_json::Value| {
        let layer = LayerDefinition::new("swap-watch", options);
        let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
        client.change_disk("b", &change).map(drop)
    };
    assert!(add(json!({ "memory": "1M" })).is_err());
    add(json!({})).unwrap();
    let remove = DiskChange { remove_layer: Some("swap-watch".into()), ..DiskChange::default() };
    client.change_disk("a", &remove).unwrap();
    assert_eq!(figure("failures_total"), None);
    nbd.write(0, &[2; 4096]);
    drop(nbd);
    daemon.end();
}
