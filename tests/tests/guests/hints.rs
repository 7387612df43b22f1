//! Hints of programs that use `guest/fathom.h`, which reach the disk as I/O classes.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use fathom_tests::{Assets, Daemon, Disk, Error, Guest, Result, Served, repository};

/// The place of each function's requests on the disk, in the program's steps, and the class with
/// which it calls it.
const CALLS: [(u64, &str, u16); 10] = [
    (1, "iwrite", 2),
    (3, "iwritev", 4),
    (5, "ipwrite", 32),
    (7, "ipwritev", 31),
    (10, "iread", 1),
    (12, "ireadv", 3),
    (14, "ipread", 5),
    (16, "ipreadv", 0),
    (18, "ipread through the page cache", 3),
    (20, "libaio", 2),
];
/// The places of requests without a hint.
const PLAIN: [u64; 3] = [22, 24, 26];
const STEP_SECTORS: u64 = (64 << 10) / 512;

/// Compiles the program. Returns an image of a disk that begins with it, and its length.
fn program(folder: &Path) -> Result<(PathBuf, u64)> {
    let (source, image) = (repository().join("tests/programs/hints.c"), folder.join("hints.img"));
    let done = Command::new("cc")
        .args(["-static", "-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(repository().join("guest"))
        .args(["-o"])
        .args([&image, &source])
        .output()
        .map_err(|error| Error::new(format!("cc: {error}")))?;
    if !done.status.success() {
        return Err(Error::new(format!("cc: {}", String::from_utf8_lossy(&done.stderr))));
    }
    let length = File::open(&image)?.metadata()?.len();
    OpenOptions::new().write(true).open(&image)?.set_len(length.next_multiple_of(1 << 20))?;
    Ok((image, length))
}

/// The class of the first request at each place while `act` runs, as a query sees them for a time.
fn watched(
    daemon: &Daemon,
    time: &str,
    act: impl FnOnce() -> Result<()>,
) -> Result<BTreeMap<u64, Option<u16>>> {
    let query = "select Sector, Class from IOstream where Type = 'Q' and Size > 0";
    let rows = thread::scope(|scope| {
        let query = scope.spawn(|| daemon.command(&["query", query, "--for", time, "--csv"]));
        let acted = act();
        let found = query.join().map_err(|_| Error::new("the query failed"))?;
        acted.and(found)
    })?;
    let mut classes = BTreeMap::new();
    for line in String::from_utf8_lossy(&rows.stdout).lines().skip(1) {
        let Some((sector, class)) = line.split_once(',') else { continue };
        let sector: u64 = sector.parse().map_err(|_| Error::new(format!("not a row: {line}")))?;
        if sector % STEP_SECTORS == 0 {
            classes.entry(sector / STEP_SECTORS).or_insert(class.parse().ok());
        }
    }
    Ok(classes)
}

/// The classes of the program's first requests by their places, in a guest with this kernel.
/// Returns `None` if the kernel is not available.
fn classes(kernel: &str) -> Result<Option<BTreeMap<u64, Option<u16>>>> {
    let assets = Assets::get()?;
    let Some(kernel) = assets.kernel(kernel)? else { return Ok(None) };
    let daemon = Daemon::serve(&[Served::sparse("disk", 16).with("classify = true")])?;
    let (image, length) = program(daemon.path("").as_path())?;
    let guest = Guest::builder()
        .kernel(kernel)
        .root(Disk::snapshot_of(&assets.root))
        .disk(Disk::vhost_user(daemon.path("disk.sock")))
        .disk(Disk::snapshot_of(image))
        .start()?;
    guest.check(&format!("head -c {length} /dev/vdc > /run/hints; chmod +x /run/hints"))?;
    let mut classes = BTreeMap::new();
    // On a busy machine, the query may begin late, or end before the program.
    for (before, all) in [(2, "6s"), (4, "12s"), (10, "30s")] {
        classes = watched(&daemon, all, || {
            thread::sleep(Duration::from_secs(before));
            assert_eq!(guest.check("/run/hints /dev/vdb")?.trim(), "right");
            Ok(())
        })?;
        if [CALLS[0].0, PLAIN[2]].iter().all(|place| classes.contains_key(place)) {
            break;
        }
    }
    guest.check_console()?;
    daemon.check("disk")?;
    guest.shutdown()?;
    Ok(Some(classes))
}

#[test]
fn hints_of_programs_are_classes() -> Result<()> {
    let Some(classes) = classes(&crate::introspection::newest())? else { return Ok(()) };
    let mut wrong = Vec::new();
    for (place, what, class) in CALLS {
        if classes.get(&place) != Some(&Some(shown(class))) {
            wrong.push(format!("{what}: {:?} instead of {class}", classes.get(&place)));
        }
    }
    for place in PLAIN {
        if classes.get(&place).is_none_or(Option::is_some) {
            wrong.push(format!("without a hint, {place}: {:?}", classes.get(&place)));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}\n{classes:?}");
    Ok(())
}

/// The class that the column shows: one above that of metadata is that.
fn shown(class: u16) -> u16 {
    if class == 32 { 32 } else { class.min(5) }
}

/// Older kernels may not carry hints: the data is the same, and a class is right or none.
#[test]
fn hints_are_harmless_in_older_kernels() -> Result<()> {
    let Some(classes) = classes(&crate::scene::kernel())? else { return Ok(()) };
    println!("{classes:?}");
    for (place, what, class) in CALLS {
        // A kernel without hints refuses the request of libaio that has one.
        let found = classes.get(&place).copied();
        let is_right = found == Some(None) || found == Some(Some(shown(class)));
        assert!(is_right || place == 20 && found.is_none(), "{what}: {found:?}");
    }
    for place in PLAIN {
        assert_eq!(classes.get(&place), Some(&None), "{place}");
    }
    Ok(())
}

/// The module for Python has the same numbers as the header for C.
#[test]
fn hints_of_python_are_those_of_c() -> Result<()> {
    let script = "import fathom
with fathom.io_class(4): pass
print([fathom.ioprio(number) for number in (0, 4, 31, 32, 33, -1)])";
    let done = Command::new("python3")
        .arg("-c")
        .arg(script)
        .env("PYTHONPATH", repository().join("guest"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .map_err(|error| Error::new(format!("python3: {error}")))?;
    let value = |class: u16| 2 << 13 | 4 | (1 << 9 | class) << 3;
    let expected = format!("[{}, {}, {}, {}, 0, 0]\n", value(0), value(4), value(31), value(32));
    assert_eq!(String::from_utf8_lossy(&done.stdout), expected, "{done:?}");
    Ok(())
}
