//! Hooks at which the guest stops too often are taken away, and come back.

use std::fmt::Write as _;

use fathom_control::{HookInfo, HookKind, ProblemKind};
use fathom_tests::{Classified, Error, Kind, Result, accelerator, patience, until};

use crate::scene::{Scene, kernel};
use crate::syscalls::rows;
use crate::writers::plugin;

/// A program that marks clean pages as dirty without end, and writes nothing to the disk.
const DIRTIES: &str = "rm -f /run/stop; (while [ ! -e /run/stop ]; do
    dd if=/dev/zero of=/mnt/storm bs=1M count=24 conv=notrunc; : > /mnt/storm
    done > /run/storm 2>&1 < /dev/null; echo ended > /run/ended) > /dev/null 2>&1 < /dev/null &";
/// A program that makes calls without end.
const CALLS: &str = "rm -f /run/stop; (while [ ! -e /run/stop ]; do
    /run/probe if=/dev/zero of=/dev/null bs=1 count=200000
    done > /run/storm 2>&1 < /dev/null; echo ended > /run/ended) > /dev/null 2>&1 < /dev/null &";
const END: &str = "touch /run/stop; while [ ! -e /run/ended ]; do sleep 0.1; done; rm /run/ended";

impl Scene {
    /// The state of a hook; `None` while the guest is not intercepted.
    fn hook(&self, of: HookKind) -> Result<Option<HookInfo>> {
        let guests =
            self.daemon.client().guests().map_err(|error| Error::new(error.to_string()))?.guests;
        Ok(guests.iter().flat_map(|guest| &guest.hooks).find(|hook| hook.of == of).copied())
    }

    /// Waits until a hook is away or in place.
    fn await_hook(&self, of: HookKind, is_away: bool) -> Result<HookInfo> {
        let what = if is_away { "the hook to be taken away" } else { "the hook to be back" };
        until(what, patience(120), || Ok(self.hook(of)?.filter(|hook| hook.is_away == is_away)))
    }

    /// Runs a script while a hook is away all the time. `begin` lets the guest stop too often until
    /// `END`. The script has to be repeatable.
    fn while_away<Found>(
        &self,
        of: HookKind,
        begin: &str,
        mut act: impl FnMut() -> Result<Found>,
    ) -> Result<Found> {
        let mut times = 0;
        loop {
            self.guest.check(begin)?;
            // Pauses double.
            until("a pause that is long enough", patience(120), || {
                let hook = self.hook(of)?.filter(|hook| hook.is_away);
                Ok(hook.filter(|hook| hook.away_ns > 3_000_000_000).map(drop))
            })?;
            self.guest.check(END)?;
            let before = self.hook(of)?;
            let found = act()?;
            let after = self.hook(of)?;
            let removals = |hook: Option<HookInfo>| hook.filter(|h| h.is_away).map(|h| h.removals);
            if removals(before).is_some() && removals(before) == removals(after) {
                return Ok(found);
            }
            times += 1;
            if times == 8 {
                return Err(Error::new("the hook comes back too soon"));
            }
        }
    }

    /// What says that a hook is away.
    fn is_said(&self, cause: &str) -> Result<()> {
        until("the problem", patience(30), || {
            let problems = self.daemon.status("disk")?.problems;
            let found = problems.iter().find(|problem| {
                problem.kind == ProblemKind::InterceptionPaused && problem.cause == cause
            });
            Ok(found.map(drop))
        })?;
        let log = self.daemon.log();
        let metric = format!("hook=\"{cause}\"");
        let metrics =
            self.daemon.client().metrics().map_err(|error| Error::new(error.to_string()))?;
        let doctor = self.daemon.command(&["doctor"])?;
        let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
        let removals = metrics.lines().find(|line| {
            line.starts_with("fathom_guest_hook_removals_total") && line.contains(&metric)
        });
        let is_counted = removals.is_some_and(|line| !line.ends_with(" 0"));
        if log.contains("problem interception-paused") && is_counted && doctor.contains("taken") {
            return Ok(());
        }
        Err(Error::new(format!("{removals:?}\n{doctor}\n{log}")))
    }
}

impl Scene {
    /// Waits until the hook has been back for so long that it is no problem any more.
    fn await_no_problem(&self) -> Result<()> {
        until("the end of the problem", patience(120), || {
            Ok(self.daemon.status("disk")?.problems.is_empty().then_some(()))
        })
    }
}

/// Writes a file whose name has the number of the program's process.
fn program(name: &str, blocks: u32) -> String {
    format!(
        "sh -c 'exec dd if=/dev/zero of=/mnt/{name}-$$ bs=4k count={blocks}' > /dev/null 2>&1\n"
    )
}

/// The bytes of data of files with a name, with the right writer, with none, and with a wrong one.
fn counts(requests: &[Classified], name: &str) -> [u64; 3] {
    let mut counts = [0; 3];
    for part in requests.iter().filter(|one| one.operation == "write").flat_map(|one| &one.parts) {
        let file = part.path.as_deref().unwrap_or_default().rsplit('/').next().unwrap_or_default();
        let Some((of, process)) = file.split_once('-') else { continue };
        if of != name || part.kind != Kind::Data {
            continue;
        }
        let is_writer = part.role.as_deref() == Some("writer");
        let outcome = match process.parse().ok() == part.process_id {
            _ if !is_writer => 1,
            true => 0,
            false => 2,
        };
        counts[outcome] += part.length;
    }
    counts
}

/// Pages that are dirty while the hook is away have no writer: those that became dirty then, on
/// memory that had a writer before, and those that were dirty already.
#[test]
fn a_busy_hook_is_taken_away_and_no_page_gets_a_wrong_writer() -> Result<()> {
    if accelerator()?.starts_with("kvm") {
        println!("Skipped: QEMU loads plugins only for emulated guests");
        return Ok(());
    }
    let table = "stops_max = 3000\n";
    let started =
        Scene::start_intercepted_above(&kernel(), 400, &plugin()?, "", 2, table, Vec::new())?;
    let Some(mut scene) = started else { return Ok(()) };
    scene.prepare(
        "mkfs.ext4 -q -F -b 4096 /dev/vdb; mount /dev/vdb /mnt
        # The guest writes nothing back before it is told to.
        echo 60000 > /proc/sys/vm/dirty_expire_centisecs
        echo 0 > /proc/sys/vm/dirty_writeback_centisecs
        echo 80 > /proc/sys/vm/dirty_ratio; echo 70 > /proc/sys/vm/dirty_background_ratio",
    )?;
    scene.await_writers()?;
    let mut many = String::new();
    for _ in 0..20 {
        many += &program("before", 30);
    }
    let requests = scene.requests(&format!("{many} sync; {}", many.replace("before", "gone")))?;
    let [right, none, wrong] = counts(&requests, "before");
    if wrong > 0 || right < 20 * 30 * 4096 {
        let problem = format!("before: {right} bytes right, {none} unknown, {wrong} wrong");
        scene.note("before", Err(Error::new(problem)));
    }
    let requests = scene.while_away(HookKind::Writers, DIRTIES, || {
        // Pages that have a writer become those of other files.
        let script = format!(
            "rm -f /mnt/gone-* /mnt/while-* /mnt/kept-*; echo 3 > /proc/sys/vm/drop_caches
            {} sync; {}",
            many.replace("before", "while"),
            program("kept", 200),
        );
        scene.requests(&script)
    })?;
    scene.is_said("writers")?;
    let [right, none, wrong] = counts(&requests, "while");
    println!("While the hook was away: {right} bytes right, {none} unknown, {wrong} wrong");
    if right + wrong > 0 || none < 20 * 30 * 4096 {
        let problem = format!("away: {right} bytes right, {none} unknown, {wrong} wrong");
        scene.note("away", Err(Error::new(problem)));
    }
    scene.await_hook(HookKind::Writers, false)?;
    // What became dirty in the meantime is unknown still.
    let requests = scene.requests("sync")?;
    let [right, none, wrong] = counts(&requests, "kept");
    println!("After it: {right} bytes right, {none} unknown, {wrong} wrong");
    if right + wrong > 0 || none < 200 * 4096 {
        let problem = format!("kept: {right} bytes right, {none} unknown, {wrong} wrong");
        scene.note("kept", Err(Error::new(problem)));
    }
    scene.await_writers()?;
    let requests = scene.requests(&format!("{} sync", many.replace("before", "after")))?;
    let [right, none, wrong] = counts(&requests, "after");
    println!("Then: {right} bytes right, {none} unknown, {wrong} wrong");
    if wrong > 0 || right < 20 * 30 * 4096 {
        let problem = format!("after: {right} bytes right, {none} unknown, {wrong} wrong");
        scene.note("after", Err(Error::new(problem)));
    }
    scene.await_no_problem()?;
    scene.end()
}

/// Calls are noted with their own ends, before and after the hooks were away.
#[test]
fn busy_calls_are_not_noted_and_later_ones_are() -> Result<()> {
    if accelerator()?.starts_with("kvm") {
        println!("Skipped: QEMU loads plugins only for emulated guests");
        return Ok(());
    }
    let table = "calls = ['probe*']\nstops_max = 40000\n";
    let started =
        Scene::start_intercepted_above(&kernel(), 400, &plugin()?, "", 2, table, Vec::new())?;
    let Some(mut scene) = started else { return Ok(()) };
    scene.prepare(
        "cp $(command -v dd) /run/probe; cp $(command -v sleep) /run/probesleep
        mkfs.ext4 -q -F -b 4096 /dev/vdb; mount /dev/vdb /mnt; echo x > /mnt/x; sync",
    )?;
    scene.await_calls("/run/probesleep 0.1")?;
    // It begins its call while calls are noted, and ends it while they are not; then it makes
    // others.
    let query = "select Process, ThreadId, Number, Call, Result, Errno, Duration, Path, SourcePath, \
        Offset, Length from Syscalls where Process = 'probesleep'";
    let csv = std::thread::scope(|scope| -> Result<_> {
        let daemon = &scene.daemon;
        let time = format!("{}s", patience(40).as_secs());
        let listening =
            scope.spawn(move || daemon.command(&["query", query, "--for", &time, "--csv"]));
        scene.guest.check(
            "for time in 2 4 6 8 10 12; do /run/probesleep $time > /run/slept 2>&1 < /dev/null & done",
        )?;
        scene.while_away(HookKind::Calls, CALLS, || {
            scene.guest.check("/run/probesleep 0.2; echo x > /mnt/y; sync; cat /mnt/y").map(drop)
        })?;
        scene.is_said("calls")?;
        scene.await_hook(HookKind::Calls, false)?;
        scene.guest.check("for i in 1 2 3; do /run/probesleep 0.3; done; wait")?;
        listening.join().map_err(|_| Error::new("the query panicked"))?
    })?;
    let mut wrong = String::new();
    for row in rows(&String::from_utf8_lossy(&csv.stdout)) {
        // Of all calls of this program only this one takes long, and it takes as long as it says.
        let sleeps = row.call == "clock_nanosleep";
        if sleeps && row.seconds < 0.15 || !sleeps && row.seconds > 1.9 {
            let _ = writeln!(wrong, "{row:?}");
        }
    }
    if !wrong.is_empty() {
        scene.note("calls", Err(Error::new(wrong)));
    }
    let found = scene.await_calls("/run/probesleep 0.1");
    scene.note("after", found);
    // The hook of pages was in place all the time.
    if scene.hook(HookKind::Writers)?.is_none_or(|hook| hook.removals > 0) {
        scene.note("pages", Err(Error::new("the hook of pages was taken away too")));
    }
    scene.await_no_problem()?;
    scene.end()
}
