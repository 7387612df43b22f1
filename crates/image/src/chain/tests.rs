use std::os::unix::fs::symlink;
use std::process::Command;

use super::*;

fn run(folder: &Path, words: &[&str]) -> bool {
    let status = Command::new(words[0]).args(&words[1..]).current_dir(folder).status();
    let Ok(status) = status else {
        eprintln!("SKIPPED: {} cannot be started", words[0]);
        return false;
    };
    assert!(status.success(), "{words:?}");
    true
}

fn refusal(image: &Path, format: ChainFormat) -> String {
    let failure = read_chain(image, format, &[]).unwrap_err();
    assert!(!failure.remedy.is_empty() || failure.message.contains("No such file"), "{failure:?}");
    format!("{failure:#}")
}

const CREATE: [&str; 5] = ["qemu-img", "create", "-q", "-f", "qcow2"];

/// Makes `name` over `backing`, without looking at that.
fn overlay(folder: &Path, name: &str, backing: &str, format: &str) -> bool {
    let rest = ["-u", "-b", backing, "-F", format, name, "8M"];
    run(folder, &[&CREATE[..], &rest].concat())
}

#[test]
fn a_chain_is_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().canonicalize().unwrap();
    File::create(place.join("0.img")).unwrap().set_len(8 << 20).unwrap();
    // A raw base whose guest has written a header stays raw.
    let bytes = [&b"QFI\xfb\0\0\0\x03"[..], &[0xff; 600]].concat();
    std::fs::write(place.join("0.img"), bytes).unwrap();
    if !overlay(&place, "1.qcow2", "0.img", "raw") {
        return;
    }
    for number in 2..=10 {
        let (above, below) = (format!("{number}.qcow2"), format!("{}.qcow2", number - 1));
        assert!(overlay(&place, &above, &below, "qcow2"));
    }
    let chain = read_chain(&place.join("10.qcow2"), ChainFormat::Qcow2, &[]).unwrap();
    assert_eq!(chain.len(), 11);
    assert_eq!(chain[0].path, place.join("10.qcow2"));
    let last = ChainLink { path: place.join("0.img"), format: ChainFormat::Raw };
    assert_eq!(chain[10], last);
    for number in 11..=40 {
        let (above, below) = (format!("{number}.qcow2"), format!("{}.qcow2", number - 1));
        assert!(overlay(&place, &above, &below, "qcow2"));
    }
    let text = refusal(&place.join("40.qcow2"), ChainFormat::Qcow2);
    assert!(text.contains("more than 32"), "{text}");
}

#[test]
fn a_chain_that_leads_astray_is_refused() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (place, other) = (folder.path(), other.path().canonicalize().unwrap());
    if !overlay(place, "a.qcow2", "b.qcow2", "qcow2") {
        return;
    }
    let top = place.join("a.qcow2");
    let text = refusal(&top, ChainFormat::Qcow2);
    assert!(text.contains("b.qcow2") && text.contains("No such file"), "{text}");
    overlay(place, "b.qcow2", "a.qcow2", "qcow2");
    assert!(refusal(&top, ChainFormat::Qcow2).contains("leads back"));
    std::fs::write(other.join("secret"), [7; 4096]).unwrap();
    let outside = other.join("secret").display().to_string();
    overlay(place, "a.qcow2", &outside, "raw");
    assert!(refusal(&top, ChainFormat::Qcow2).contains("outside the folders"));
    assert_eq!(
        read_chain(&top, ChainFormat::Qcow2, std::slice::from_ref(&other)).unwrap().len(),
        2
    );
    symlink(other.join("secret"), place.join("link")).unwrap();
    overlay(place, "a.qcow2", "link", "raw");
    assert!(refusal(&top, ChainFormat::Qcow2).contains("outside the folders"));
    overlay(place, "a.qcow2", "../../../../../../etc/hostname", "raw");
    assert!(refusal(&top, ChainFormat::Qcow2).contains("outside the folders"));
    for name in ["nbd://127.0.0.1/x", "json:{\"driver\":\"file\"}", "file:b.qcow2", "ssh:x/y"] {
        overlay(place, "a.qcow2", name, "raw");
        assert!(refusal(&top, ChainFormat::Qcow2).contains("is no path"), "{name}");
    }
    // A format that nobody names is not guessed.
    overlay(place, "b.qcow2", "c.img", "raw");
    std::fs::write(place.join("c.img"), [1; 4096]).unwrap();
    overlay(place, "a.qcow2", "b.qcow2", "qcow2");
    let mut bytes = std::fs::read(&top).unwrap();
    let named = bytes.windows(4).position(|it| it == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    // An extension of another kind.
    bytes[named] = 1;
    std::fs::write(&top, bytes).unwrap();
    assert!(refusal(&top, ChainFormat::Qcow2).contains("may be raw"));
    std::fs::write(place.join("b.qcow2"), [1; 4096]).unwrap();
    let chain = read_chain(&top, ChainFormat::Qcow2, &[]).unwrap();
    assert_eq!(chain[1].format, ChainFormat::Raw);
    overlay(place, "a.qcow2", "b.qcow2", "parallels");
    assert!(refusal(&top, ChainFormat::Qcow2).contains("`parallels` of its backing"));
}

#[test]
fn each_format_is_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    for name in ["qcow2", "vmdk", "vhdx", "vdi"] {
        let file = format!("image.{name}");
        if !run(place, &["qemu-img", "create", "-q", "-f", name, &file, "8M"]) {
            return;
        }
        for other in ["qcow2", "vmdk", "vhdx", "vdi"] {
            let read = read_chain(&place.join(&file), ChainFormat::of_name(other).unwrap(), &[]);
            assert_eq!(read.is_ok(), name == other, "{name} as {other}: {read:?}");
        }
    }
    let make = |options: &str, name: &str, format: &str| {
        run(place, &["qemu-img", "create", "-q", "-f", format, "-o", options, name, "8M"])
    };
    make("subformat=twoGbMaxExtentSparse", "split.vmdk", "vmdk");
    assert!(refusal(&place.join("split.vmdk"), ChainFormat::Vmdk).contains("other files"));
    make("subformat=streamOptimized", "stream.vmdk", "vmdk");
    read_chain(&place.join("stream.vmdk"), ChainFormat::Vmdk, &[]).unwrap();
    run(
        place,
        &["qemu-img", "create", "-q", "-f", "vmdk", "-b", "image.vmdk", "-F", "vmdk", "o.vmdk"],
    );
    assert!(refusal(&place.join("o.vmdk"), ChainFormat::Vmdk).contains("a parent"));
    make("data_file=data.raw", "external.qcow2", "qcow2");
    assert!(refusal(&place.join("external.qcow2"), ChainFormat::Qcow2).contains("another file"));
    let secret =
        ["--object", "secret,id=s,data=abc", "-o", "encrypt.format=luks,encrypt.key-secret=s"];
    let words = [&CREATE[..], &secret, &["luks.qcow2", "8M"]].concat();
    run(place, &words);
    assert!(refusal(&place.join("luks.qcow2"), ChainFormat::Qcow2).contains("encrypted"));
    make("compat=0.10", "old.qcow2", "qcow2");
    read_chain(&place.join("old.qcow2"), ChainFormat::Qcow2, &[]).unwrap();
    make("extended_l2=on,compression_type=zstd,cluster_size=128k", "new.qcow2", "qcow2");
    read_chain(&place.join("new.qcow2"), ChainFormat::Qcow2, &[]).unwrap();
    assert!(refusal(Path::new("/dev/null"), ChainFormat::Qcow2).contains("neither a file"));
}

/// The first KiB of real images, mutated.
#[test]
fn no_header_breaks_the_reader() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let mut seeds = Vec::new();
    for (name, options) in [
        ("qcow2", "compat=1.1"),
        ("qcow2", "compat=0.10"),
        ("vmdk", "subformat=monolithicSparse"),
        ("vhdx", "subformat=dynamic"),
        ("vdi", "static=off"),
    ] {
        let words = ["qemu-img", "create", "-q", "-f", name, "-o", options, "seed", "8M"];
        if !run(place, &words) {
            return;
        }
        seeds.push(std::fs::read(place.join("seed")).unwrap());
        if name == "qcow2" {
            let words = ["qemu-img", "rebase", "-u", "-b", "below.img", "-F", "raw", "seed"];
            run(place, &words);
            seeds.push(std::fs::read(place.join("seed")).unwrap());
        }
    }
    for seed in &mut seeds {
        assert!(fuzz_image_header(seed));
        seed.truncate(16 << 10);
    }
    let (mut chance, mut accepted) = (fastrand::Rng::with_seed(40), 0);
    for _ in 0..10_000 {
        let mut bytes = seeds[chance.usize(..seeds.len())].clone();
        for _ in 0..chance.usize(1..8) {
            let end = if chance.bool() { 112 } else { 1024 };
            let at = chance.usize(..end.min(bytes.len()));
            bytes[at] = if chance.bool() { chance.u8(..) } else { 0xff };
        }
        if chance.u8(..8) == 0 {
            bytes.truncate(chance.usize(..bytes.len()));
        }
        accepted += u32::from(fuzz_image_header(&bytes));
    }
    // Both ends are reached.
    assert!((1000..9900).contains(&accepted), "{accepted}");
}
