//! The table in use: by threads, and by a process that is killed.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::*;
use crate::{Buffers, GuestAddress, GuestMemory, Purpose};

const PAGE: u64 = 4096;
const PAGES: u64 = 16;
const OWNER: TableOwner = TableOwner { process: 1, start_ticks: 1, namespace: 1 };
/// Names the folder for the test that plays the holder.
const HOLDER: &str = "FATHOM_TEST_LEASE_HOLDER";

struct Scene {
    folder: TempDir,
    file: File,
}

impl Scene {
    fn start() -> (Self, PagerLeases) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(PAGES * PAGE).unwrap();
        let pager = pager(folder.path(), &file);
        (Self { folder, file }, pager)
    }

    fn plain(&self) -> GuestMemory {
        let mut memory = GuestMemory::default();
        memory.add(0, PAGE, self.file.try_clone().unwrap(), 0, &Arc::default()).unwrap();
        memory
    }

    fn memory(&self) -> GuestMemory {
        memory(self.folder.path(), &self.file).0
    }
}

fn pager(folder: &Path, file: &File) -> PagerLeases {
    PagerLeases::start(folder, MemoryFile::of(file).unwrap(), PAGES, OWNER).unwrap()
}

fn place(scene: &Scene) -> folder::TableFolder {
    folder::TableFolder::of(scene.folder.path(), MemoryFile::of(&scene.file).unwrap())
}

/// The memory behind a hole at its beginning, with leases.
fn memory(folder: &Path, file: &File) -> (GuestMemory, Arc<GuestLeases>) {
    let mut memory = GuestMemory::default();
    let part = (PAGES - 1) * PAGE;
    memory.add(0x10_0000, part, file.try_clone().unwrap(), PAGE, &Arc::default()).unwrap();
    let leases = GuestLeases::find(folder, &memory).unwrap().expect("a table");
    (memory.with_pager(Arc::clone(&leases) as _), leases)
}

#[test]
fn accesses_are_leases_of_the_pages_of_the_file() {
    let (scene, pager) = Scene::start();
    let memory = scene.memory();
    assert_ne!(memory.pager_identity(), 0);
    let leased = || -> Vec<u64> {
        (0..PAGES).filter(|page| pager.table().word(*page).is_leased()).collect()
    };
    let ring = memory.hold(GuestAddress(0x10_1000), 2 * PAGE, Purpose::Write).unwrap();
    assert_eq!(leased(), [2, 3]);
    let mut buffers = Buffers::default();
    // SAFETY: the memory outlives the buffers.
    let is_lent =
        unsafe { memory.lend(&mut buffers, GuestAddress(0x10_4ff0), PAGE, Purpose::Read) };
    assert!(is_lent);
    assert_eq!(leased(), [2, 3, 5, 6]);
    buffers.clear();
    drop(ring);
    assert_eq!(memory.u64(0x10_0000), Some(0));
    assert_eq!(leased(), [] as [u64; 0]);
    assert!(memory.without_pager().unwrap().window(0x10_0000).u64(0).is_some());
}

#[test]
fn a_page_that_is_away_is_absent_and_wanted_by_all_but_looks() {
    let (scene, pager) = Scene::start();
    let memory = scene.memory();
    let table = pager.table();
    table.change(3, PageWord::leave).unwrap();
    table.change(3, PageWord::evict).unwrap();
    assert_eq!(memory.u64(0x10_2000), None);
    assert_eq!(memory.u64(0x10_1000), Some(0));
    assert_eq!(memory.window(0x10_1ff8).u64(0), Some(0));
    assert_eq!(memory.window(0x10_1ff8).u64(8), None);
    assert!(!table.word(3).is_wanted());
    assert!(memory.access(0x10_1000, 2 * PAGE, Purpose::Write).is_none());
    assert!(table.word(3).is_wanted() && !table.word(2).is_leased());
    table.change(3, PageWord::come).unwrap();
    table.change(3, PageWord::arrive).unwrap();
    assert!(memory.access(0x10_1000, 2 * PAGE, Purpose::Write).is_some());
}

#[test]
fn tables_end_with_their_pager_and_are_taken_up_after_its_death() {
    let (scene, first) = Scene::start();
    let memory = scene.memory();
    let _held = memory.access(0x10_0000, 8, Purpose::Write).unwrap();
    let table = first.table();
    table.change(4, PageWord::leave).unwrap();
    table.change(5, PageWord::leave).unwrap();
    table.change(5, PageWord::copied).unwrap();
    drop(first);
    let second = pager(scene.folder.path(), &scene.file);
    assert!(second.table().word(1).is_leased());
    assert_eq!([4, 5].map(|page| second.table().word(page)), [PageWord(0); 2]);
    second.put_aside();
    let bare = scene.plain();
    assert!(GuestLeases::find(scene.folder.path(), &bare).unwrap().is_none());
    // Rubbish is refused; a pager replaces it.
    let place = place(&scene);
    std::fs::create_dir(place.path()).unwrap();
    std::fs::write(place.table(), vec![7; 8192]).unwrap();
    assert!(GuestLeases::find(scene.folder.path(), &bare).is_err());
    pager(scene.folder.path(), &scene.file);
    assert!(GuestLeases::find(scene.folder.path(), &bare).unwrap().is_some());
}

#[test]
fn a_lost_table_grants_nothing() {
    let (scene, _pager) = Scene::start();
    let memory = scene.memory();
    assert!(memory.access(0x10_0000, 8, Purpose::Read).is_some());
    File::options().write(true).open(place(&scene).table()).unwrap().set_len(0).unwrap();
    // The access that notices it may still be granted.
    let _ = memory.access(0x10_0000, 8, Purpose::Read);
    assert!(memory.access(0x10_0000, 8, Purpose::Read).is_none());
    assert_eq!(memory.u64(0x10_0000), None);
}

/// Not a test of its own: the process that is killed.
#[test]
fn a_holder_in_a_process_of_its_own() {
    let Ok(folder) = std::env::var(HOLDER) else { return };
    let path = Path::new(&folder).join("memory");
    let file = File::options().read(true).write(true).open(path).unwrap();
    let (memory, leases) = memory(Path::new(&folder), &file);
    let _reads = memory.access(0x10_0000, 8, Purpose::Read).unwrap();
    let _writes = memory.access(0x10_1000, 8, Purpose::Write).unwrap();
    leases.set_ready();
    println!("holds");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn reads_of_a_killed_process_are_given_back_and_its_writes_stay() {
    let (scene, pager) = Scene::start();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lease::tests::a_holder_in_a_process_of_its_own", "--nocapture"])
        .env(HOLDER, scene.folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("holds")));
    assert_eq!(pager.holders().unwrap(), [child.id()]);
    let leased = |page| pager.table().word(page).is_leased();
    assert_eq!([1, 2].map(leased), [true, true]);
    // This process takes the other place.
    let (memory, own) = memory(scene.folder.path(), &scene.file);
    assert_eq!(pager.holders().unwrap(), [child.id()], "it is not ready");
    own.set_ready();
    assert_eq!(pager.holders().unwrap(), [child.id(), std::process::id()]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(pager.holders().unwrap(), [std::process::id()]);
    assert_eq!([1, 2].map(leased), [false, true]);
    assert!(pager.table().change(2, PageWord::leave).is_err());
    assert!(memory.access(0x10_1000, 8, Purpose::Write).is_some());
    assert_eq!([1, 2].map(leased), [false, true], "what the dead has stays");
}

#[test]
fn threads_that_write_with_leases_never_change_a_valid_copy() {
    let (scene, pager) = Scene::start();
    let memory = scene.memory();
    let table = pager.table();
    let is_over = AtomicBool::new(false);
    let (mut copies, mut compared) = (0, 0);
    std::thread::scope(|scope| {
        for thread in 0..3_u8 {
            let (memory, is_over) = (memory.clone(), &is_over);
            scope.spawn(move || {
                let mut value = thread;
                while !is_over.load(Ordering::Relaxed) {
                    value = value.wrapping_add(3);
                    let access = memory.access(0x10_0000, 4096, Purpose::Write).unwrap();
                    access.write(0, &[value; 4096]);
                    drop(access);
                    std::thread::sleep(Duration::from_micros(u64::from(value)));
                }
            });
        }
        let begun = Instant::now();
        // The page of that address is the second one of the file.
        let content = || {
            let mut bytes = [0; 4096];
            std::os::unix::fs::FileExt::read_exact_at(&scene.file, &mut bytes, PAGE).unwrap();
            bytes
        };
        while (copies < 200 || compared < 20) && begun.elapsed() < Duration::from_secs(30) {
            if table.change(1, PageWord::leave).is_err() {
                std::thread::yield_now();
                continue;
            }
            let copy = content();
            if table.change(1, PageWord::copied).is_err() {
                let _ = table.change(1, |word| Some(word.stay()));
                continue;
            }
            copies += 1;
            let now = content();
            if table.word(1).is_copied() {
                assert!(copy == now, "a valid copy differs");
                compared += 1;
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    println!("{copies} copies, {compared} comparisons");
    assert!(copies > 0 && compared > 0);
    assert!(!table.word(1).is_leased());
}

#[test]
fn a_table_is_of_one_machine_and_goes_with_it() {
    let (scene, pager) = Scene::start();
    let file = MemoryFile::of(&scene.file).unwrap();
    let _ = pager.table().change(3, |word| word.lease(0, Purpose::Write));
    drop(pager);
    let folder = scene.folder.path();
    let again = PagerLeases::start(folder, file, PAGES, OWNER).unwrap();
    assert!(again.table().word(3).is_leased(), "a lease outlives a pager");
    PagerLeases::remove_ended(folder, |owner| owner != OWNER);
    assert!(PagerLeases::join(folder, file, PAGES).is_ok());
    // Another machine's memory has the same number later.
    let other = TableOwner { process: 1, start_ticks: 2, namespace: 1 };
    let new = PagerLeases::start(folder, file, PAGES, other).unwrap();
    assert!(!new.table().word(3).is_leased());
    let names = || {
        let entries = std::fs::read_dir(folder).unwrap().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    };
    // What another process is removing is left alone.
    let aside = names().into_iter().find(|name| name.starts_with(".ended")).unwrap();
    let lock = File::open(folder.join(&aside)).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    PagerLeases::remove_ended(folder, |_| false);
    assert!(names().contains(&aside));
    drop(lock);
    PagerLeases::remove_ended(folder, |owner| owner == other);
    PagerLeases::join(folder, file, PAGES).unwrap_err();
    assert_eq!(names(), ["memory"]);
    // One that was begun, and not completed, goes with its machine, too.
    let place = place(&scene);
    place.begin(other).unwrap();
    PagerLeases::remove_ended(folder, |_| false);
    assert_eq!(names().len(), 2);
    place.begin(other).unwrap();
    PagerLeases::remove_ended(folder, |owner| owner == other);
    assert_eq!(names(), ["memory"]);
    // What an earlier version has left is not taken for a table.
    std::fs::write(place.path(), "x").unwrap();
    let error = PagerLeases::start(folder, file, PAGES, OWNER).unwrap_err();
    assert!(error.to_string().contains("earlier version"), "{error}");
    assert!(GuestLeases::find(folder, &scene.plain()).is_err(), "it would serve without leases");
}

/// This program as another user, without any right. `None` if this user may not become another, or
/// the other may not run it.
fn as_other_user(user: u32) -> Option<Command> {
    let user = user.to_string();
    let command = || {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
        command.args(["--bounding-set", "-all", "--inh-caps", "-all", "--"]);
        command
    };
    let program = std::env::current_exe().unwrap();
    let can_run = command().args(["test", "-x"]).arg(&program).status();
    if !can_run.is_ok_and(|status| status.success()) {
        println!("Skipped: this program cannot be run as user {user}");
        return None;
    }
    let mut command = command();
    command.arg(program);
    Some(command)
}

#[test]
fn a_touch_of_a_page_that_is_away_is_an_error_for_a_user_without_rights_too() {
    let Some(mut command) = as_other_user(65_534) else { return };
    // The kernel lets it make userfaultfds for its own faults only.
    let output = command.args(["lease::absent_tests::", "--test-threads=1"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let count = text.matches("... ok").count();
    assert!(count >= 5, "{count} tests: {text}");
}

#[test]
fn a_user_who_is_admitted_has_a_place_and_no_other_user() {
    let (scene, pager) = Scene::start();
    let open = |mode| PermissionsExt::from_mode(mode);
    std::fs::set_permissions(scene.folder.path(), open(0o711)).unwrap();
    scene.file.set_permissions(open(0o666)).unwrap();
    let own = scene.file.metadata().unwrap().uid();
    let holder = |user| {
        let mut command = as_other_user(user)?;
        command.args(["--exact", "lease::tests::a_holder_in_a_process_of_its_own", "--nocapture"]);
        command.env(HOLDER, scene.folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Some(command)
    };
    let Some(mut refused) = holder(65_533) else { return };
    if let Err(error) = pager.admit(&[own, 65_534]) {
        println!("Skipped: no access control lists here: {error}");
        return;
    }
    let output = refused.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("PermissionDenied"), "{text}");
    // It may be started again, and finds its place each time.
    for _ in 0..2 {
        let mut child = holder(65_534).unwrap().spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("holds")));
        assert_eq!(pager.holders().unwrap(), [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(pager.holders().unwrap().is_empty());
    }
    // The next pager of the machine need not admit it again.
    drop(pager);
    let again = self::pager(scene.folder.path(), &scene.file);
    let mut child = holder(65_534).unwrap().spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("holds")));
    assert_eq!(again.holders().unwrap(), [child.id()]);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_table_that_says_it_is_larger_is_not_used() {
    let (scene, pager) = Scene::start();
    let file = MemoryFile::of(&scene.file).unwrap();
    let path = place(&scene).table();
    let table = File::options().write(true).open(path).unwrap();
    // A holder makes it larger: whoever looked at all its words would make a page for each.
    table.set_len(1 << 36).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&table, &(1_u64 << 32).to_ne_bytes(), 32).unwrap();
    let error = PagerLeases::join(scene.folder.path(), file, PAGES).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    let error = GuestLeases::find(scene.folder.path(), &scene.plain()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert_eq!(pager.table().pages(), PAGES);
    assert!(table.metadata().unwrap().blocks() < 64, "pages were made");
}

#[test]
fn a_word_that_somebody_changes_without_end_is_given_up() {
    let (_scene, pager) = Scene::start();
    let table = pager.table();
    let tries = std::cell::Cell::new(0_u32);
    // Somebody else changes it after each look.
    let outcome = table.change(3, |word| {
        tries.set(tries.get() + 1);
        table.change(3, |_| Some(PageWord(word.0 ^ 1 << 8))).unwrap();
        Some(word)
    });
    assert!(outcome.is_err_and(PageWord::is_leased), "it is taken for a leased one");
    assert_eq!(tries.get(), 1 << 16);
}
