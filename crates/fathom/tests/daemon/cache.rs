//! The layer `cache` of served disks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::{Value, json};

use crate::nbd::{Nbd, WRITE};
use crate::process::{Daemon, command};

/// The size of a block.
pub const BLOCK: u64 = 16 << 10;

fn change(layers: &[(&str, Value)]) -> DiskChange {
    let layers = layers.iter().map(|(kind, options)| LayerDefinition::new(kind, options.clone()));
    DiskChange { layers: Some(layers.collect()), ..DiskChange::default() }
}

/// Fills a block with one byte.
pub fn write(nbd: &mut Nbd, block: u64, content: u8) {
    let data = [content; BLOCK as usize];
    assert!(nbd.send(WRITE, 7, block * BLOCK, BLOCK as u32, &data));
    assert_eq!(nbd.reply(), Some((7, 0)));
}

/// The byte that fills a block.
pub fn read(nbd: &mut Nbd, block: u64) -> u8 {
    let data = nbd.read(block * BLOCK, BLOCK as u32);
    assert!(data.iter().all(|byte| *byte == data[0]), "a block is torn");
    data[0]
}

/// Runs `fathom cache ARGUMENTS` in `folder`.
pub fn cache(folder: &Path, arguments: &[&str]) -> Output {
    command(folder).arg("cache").args(arguments).output().unwrap()
}

/// What a command prints.
pub fn text(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

/// Runs a command that has to succeed.
pub fn succeeds(folder: &Path, arguments: &[&str]) -> String {
    let output = cache(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    text(&output)
}

/// Runs a command that has to fail with `expected` in its messages.
pub fn fails(folder: &Path, arguments: &[&str], expected: &str) {
    let output = cache(folder, arguments);
    assert!(!output.status.success() && text(&output).contains(expected), "{}", text(&output));
}

#[test]
fn disks_share_a_cache_that_follows_their_changes() {
    let layer = "layers = [{ kind = \"cache\", name = \"both\", size = \"1M\" }]";
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(8 << 20).unwrap();
    }
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nimage = \"a.img\"\n{layer}\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n{layer}\n"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let client = daemon.client();
    let figure = |disk: &str, name: &str| client.disk(disk).unwrap().figure("cache", name).unwrap();
    let [mut a, mut b] = ["a", "b"].map(|disk| Nbd::connect(&daemon.path("nbd.sock"), disk));
    for block in 0..8 {
        write(&mut a, block, 1 + block as u8);
    }
    assert_eq!(figure("a", "insertions_total"), figure("b", "insertions_total"));
    let expected: Vec<u8> = (1..9).collect();
    let found = |nbd: &mut Nbd| (0..8).map(|block| read(nbd, block)).collect::<Vec<_>>();
    // The content of a write is in the cache soon after its completion.
    daemon.until("the blocks to be in the cache", || figure("a", "blocks") == 8);
    assert_eq!(found(&mut a), expected);
    assert_eq!(figure("a", "hits_total"), 8);
    // The same blocks of the other disk are others.
    assert_eq!(found(&mut b), [0; 8]);
    assert_eq!(figure("b", "hits_total"), 0);
    // What the image has now is not asked for.
    let image = File::options().write(true).open(daemon.path("a.img")).unwrap();
    image.write_all_at(&[99; BLOCK as usize], 0).unwrap();
    assert_eq!(read(&mut a, 0), 1);

    // Without the layer, and with it again, the disk is what the image has.
    client.change_disk("a", &change(&[])).unwrap();
    assert_eq!(read(&mut a, 0), 99);
    let again = json!({ "name": "both", "size": "1M", "mode": "write-around" });
    client.change_disk("a", &change(&[("cache", again)])).unwrap();
    assert_eq!(read(&mut a, 0), 99);
    daemon.until("the block to be in the cache", || figure("a", "insertions_total") > 8);
    // A change of the mode keeps the layer with its blocks and counts.
    let reads = figure("a", "reads_total");
    write(&mut a, 0, 5);
    let other = json!({ "name": "both", "size": "1M", "mode": "read-only" });
    client.change_disk("a", &change(&[("cache", other)])).unwrap();
    assert_eq!((read(&mut a, 0), figure("a", "reads_total")), (5, reads + 1));
    let metrics = client.metrics().unwrap();
    assert!(metrics.contains("fathom_layer_cache_hits_total{disk=\"a\""), "{metrics}");
}

#[test]
fn a_cache_has_one_size() {
    let daemon = Daemon::start(
        "[[disk]]\nname = \"a\"\nmemory = \"8M\"\nlayers = [{ kind = \"cache\", name = \"x\" }]\n\
         [[disk]]\nname = \"b\"\nmemory = \"8M\"\n",
    );
    let client = daemon.client();
    let refused = |options: Value| {
        client.change_disk("b", &change(&[("cache", options)])).unwrap_err().to_string()
    };
    let other = refused(json!({ "name": "x", "size": "2M" }));
    assert!(other.contains("another `size`"), "{other}");
    let odd = refused(json!({ "block_size": "20K" }));
    assert!(odd.contains("power of two"), "{odd}");
    let small = refused(json!({ "size": "4K" }));
    assert!(small.contains("1 MiB"), "{small}");
    client.change_disk("b", &change(&[("cache", json!({ "name": "x" }))])).unwrap();
}
