//! A daemon of another user than the pager's: it is let in to the tables of leases, comes back
//! after its death and the pager's, and can harm only the guest that it serves.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use fathom_attach::{Request, ask};

use crate::evictions::{LIMIT, PATTERN, await_away, kill, status};
use crate::holder::{Holder, Program, as_user, leases, table};
use crate::machine::{Machine, PagerProcess, until};

/// Users that need not exist.
const USER: u32 = 65_534;
const SECOND: u32 = 61_234;
const STRANGER: u32 = 61_235;

/// Whether another user may run programs of this one here.
fn can_run(program: &Program) -> bool {
    let can = as_user(USER).args(["test", "-x"]).arg(program.path()).status();
    let can = can.is_ok_and(|status| status.success());
    if !can {
        println!("Skipped: another user cannot run {}", program.path().display());
    }
    can
}

fn may_use(user: u32, path: &std::path::Path) -> bool {
    as_user(user).args(["test", "-w"]).arg(path).status().unwrap().success()
}

pub fn a_daemon_of_another_user() {
    let mut machine = Machine::with_pattern();
    let program = Program::installed(&machine);
    if !can_run(&program) {
        return;
    }
    let evicting = |mode: &str| {
        let mut pager = PagerProcess::start_evicting(&machine, mode, "", Some(LIMIT));
        pager.attached();
        pager
    };
    let pager = evicting("attach");
    await_away(&machine, PATTERN / 3);
    // It comes when pages are away, and waits until it is let in.
    let mut holder = Holder::start(&machine, &program, USER, "honest");
    holder.says("ready");
    for _ in 0..3 {
        holder.says("checked");
    }
    let counts = await_away(&machine, PATTERN / 3);
    assert!(counts.wanted > 100, "{counts:?}");
    let table = table(&machine);
    assert!(may_use(USER, &table) && !may_use(STRANGER, &table), "{}", table.display());
    // It is started again, and has its place from the beginning, without any look.
    drop(holder);
    let mut holder = Holder::start(&machine, &program, USER, "honest");
    holder.says("checked");
    // One of a second user shares the memory.
    let mut second = Holder::start(&machine, &program, SECOND, "honest");
    second.says("ready");
    second.says("checked");
    holder.says("checked");
    await_away(&machine, PATTERN / 3);
    drop(second);
    // The guard serves what it wants, and one that is started meanwhile.
    pager.kill();
    holder.says("checked");
    drop(holder);
    let mut holder = Holder::start(&machine, &program, USER, "honest");
    holder.says("checked");
    let pager = evicting("adopt");
    await_away(&machine, PATTERN / 3);
    holder.says("checked");
    let last = pager.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    // The table stays, and one that comes now takes its place in it.
    assert!(may_use(USER, &table));
    holder.says("checked");
    drop(holder);
    let mut holder = Holder::start(&machine, &program, USER, "honest");
    holder.says("checked");
    // The program is replaced, as by an upgrade: what runs is still root's.
    std::fs::remove_file(program.path()).unwrap();
    let pager = evicting("attach");
    await_away(&machine, PATTERN / 3);
    holder.says("checked");
    pager.detach();
    drop(holder);
    machine.check_pattern();
}

pub fn a_fathom_that_is_not_of_root_has_all_pages_come_in() {
    let mut machine = Machine::with_pattern();
    let programs = [
        (Program::new(&machine, "fathom", USER, 0o755), "honest", "does not belong to root alone"),
        (Program::new(&machine, "fathom", USER, 0o555), "hidden", "does not belong to root alone"),
        (Program::new(&machine, "fathom", 0, 0o775), "honest", "does not belong to root alone"),
        (Program::new(&machine, "other", 0, 0o755), "honest", "(other) also maps"),
    ];
    if !can_run(&programs[0].0) {
        return;
    }
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    for (program, mode, reason) in programs {
        await_away(&machine, PATTERN / 3);
        let mut holder = Holder::start(&machine, &program, USER, mode);
        holder.says("maps");
        let now = until("all pages to come in", || {
            let now = status(&machine).eviction;
            (now.away_bytes == 0 && !now.retreat.is_empty()).then_some(now)
        });
        let process = format!("process {} ", holder.process());
        assert!(now.retreat.contains(reason) && now.retreat.contains(&process), "{now:?}");
        let folder = table(&machine).with_file_name("");
        let mode = folder.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "it was let in");
        machine.check_pattern();
        drop(holder);
        until("the end of the retreat", || {
            status(&machine).eviction.retreat.is_empty().then_some(())
        });
    }
    pager.detach();
    machine.check_pattern();
}

pub fn a_daemon_that_means_harm() {
    for harm in ["states", "anything", "truncates"] {
        let mut other = Machine::with_pattern();
        let mut others = PagerProcess::start_evicting(&other, "attach", "", Some(LIMIT));
        others.attached();
        let machine = Machine::with_pattern();
        let program = Program::installed(&machine);
        if !can_run(&program) {
            return;
        }
        let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
        pager.attached();
        await_away(&machine, PATTERN / 3);
        let mut holder = Holder::start(&machine, &program, USER, harm);
        for _ in 0..200 {
            holder.says("harms");
        }
        // The pager lives, answers, and lets go, while the harm goes on. The guest may be lost.
        let found = ask(&machine.folder(), machine.process(), Request::Status).unwrap();
        println!("{harm}: {:?}", found.eviction);
        let last = pager.detach();
        println!("{harm}: {}, {} away", last.state, last.eviction.away_bytes);
        // Other machines and their pagers notice nothing.
        await_away(&other, PATTERN / 3);
        other.check_pattern();
        others.detach();
        other.check_pattern();
    }
}

/// A daemon's user can hold the lock of a table in the kernel for ever. Nobody waits for it: not
/// its own pager, not other daemons, not the pagers of other machines, whether its machine runs or
/// has ended.
pub fn a_daemon_that_holds_the_kernels_locks() {
    let mut machine = Machine::with_pattern();
    let mut other = Machine::with_pattern();
    // Of the machine that stays.
    let program = Program::installed(&other);
    if !can_run(&program) {
        return;
    }
    // Both machines' tables are in one folder, as on a host.
    let shared = tempfile::tempdir().unwrap();
    std::fs::set_permissions(shared.path(), PermissionsExt::from_mode(0o711)).unwrap();
    for machine in [&machine, &other] {
        std::os::unix::fs::symlink(shared.path(), leases(machine)).unwrap();
    }
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 3);
    let table = table(&machine);
    let mut hostile = Holder::start(&machine, &program, USER, "holds");
    hostile.says("holds");
    // It is held.
    let mut waits = Command::new("chmod").arg("666").arg(&table).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(waits.try_wait().unwrap().is_none(), "the lock is not held");
    // A daemon of another user is let in and served.
    let mut honest = Holder::start(&machine, &program, SECOND, "honest");
    honest.says("ready");
    honest.says("checked");
    // The pager dies, its guard serves, the next one does, and detaches.
    pager.kill();
    honest.says("checked");
    let mut pager = PagerProcess::start_evicting(&machine, "adopt", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 3);
    honest.says("checked");
    assert_eq!(pager.detach().state, "detached");
    machine.check_pattern();
    // Its machine ends while a pager serves.
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 3);
    drop(honest);
    kill(machine.process() as u32);
    until("the end of QEMU", || machine.ended());
    let last = pager.detach();
    assert_eq!(last.state, "ended", "{last:?}");
    // Another machine's pager, whose cleaner meets the table, and its daemon.
    let mut others = PagerProcess::start_evicting(&other, "attach", "", Some(LIMIT));
    others.attached();
    await_away(&other, PATTERN / 3);
    let mut honest = Holder::start(&other, &program, SECOND, "honest");
    honest.says("ready");
    honest.says("checked");
    assert!(waits.try_wait().unwrap().is_none(), "the lock is not held any more");
    let names = || std::fs::read_dir(shared.path()).unwrap().count();
    assert!(names() > 1, "the table is gone, though nobody can remove it");
    // When the lock is free, the cleaner goes on.
    drop(hostile);
    waits.wait().unwrap();
    until("the end of the table", || (names() == 1).then_some(()));
    others.detach();
    drop(honest);
    other.check_pattern();
}
