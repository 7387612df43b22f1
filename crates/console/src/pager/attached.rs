//! The pagers of this host: `fathom pager attach`, `adopt`, `limit`, `detach`, `list`.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use clap::{Args, Subcommand};
use fathom_attach::{
    AttachOptions, Control, EvictionOptions, FOLDER, Helpers, LEASE_FOLDER, Pager, PagerStatus,
    Request, STORE_FOLDER, ServeEnd, SystemCall, Vmm,
};
use fathom_control::{Bytes, EXISTING_PAGES_MAX};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::work::{LIMIT_BYTES_MIN, WorkArguments, at_least};
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::{self, Format};

/// The name of the hidden command for the helpers.
const HELPER: &str = "pager-helper";
/// The longest command line in which a machine's name is searched, in bytes.
const COMMAND_BYTES_MAX: usize = 1 << 20;

/// Which machine, and where pagers keep their records.
#[derive(Debug, Args)]
struct Target {
    /// The machine: its QEMU's process, or its name (-name)
    #[arg(value_name = "MACHINE")]
    machine: String,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
struct Folder {
    /// The folder of the pagers' records
    #[arg(long, value_name = "FOLDER", default_value = FOLDER)]
    folder: PathBuf,
}

/// Options of `fathom pager attach`.
#[derive(Debug, Args)]
#[command(after_help = "\
The command is the pager: it serves the machine's faults until it is asked to detach, or gets
SIGTERM or SIGINT. If it is killed, its guard, a second process, serves in its place.

With --limit, what is more than that of the guest's memory leaves the host's memory, compressed, and
comes back when the guest, or the daemon, touches it. The store is in memory, too: so the host wins
what compression saves. With --swap, what is oldest goes on to a file on a disk, uncompressed and not
encrypted, when the store takes more than --pages-limit. `fathom pager limit` changes the limit of a
pager that runs.

With --shadow it does all that would take a page away, but for taking it away, and compares: a
mismatch in `fathom pager list` would have been a lost write. The daemon takes leases meanwhile.

Examples:
  fathom pager attach web --qmp /run/web.qmp --limit 2G
  fathom pager attach web --qmp /run/web.qmp --limit 2G --swap /var/lib/fathom-pager
  fathom pager attach web --qmp /run/web.qmp --shadow 64M
  fathom pager attach 4711 --json        without --qmp, QEMU itself needs the right

Exit status: 0 when it has detached or the machine has ended, 1 for a failure, 2 for an invalid
command line.")]
pub struct AttachCommand {
    #[command(flatten)]
    target: Target,
    /// A socket of the machine's QMP that nothing else uses: over it, QEMU gets the right
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    #[command(flatten)]
    work: WorkArguments,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom pager limit`.
#[derive(Debug, Args)]
#[command(after_help = "\
Pages leave, or may stay, from now on. Pages that are away come back when they are touched; to have
all of them back, detach the pager.

Examples:
  fathom pager limit web 2G
  fathom pager limit web none
  fathom pager limit 4711 512M --json

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct LimitCommand {
    #[command(flatten)]
    target: Target,
    /// The most bytes of the guest's memory that are to be in the host's memory, or `none`
    #[arg(value_name = "SIZE")]
    limit: Limit,
    #[command(flatten)]
    format: Format,
}

/// A limit in bytes; none for `none`.
#[derive(Clone, Copy, Debug)]
struct Limit(Option<u64>);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let Bytes(bytes) = text.parse().map_err(|error| format!("{error}; or `none`"))?;
        Ok(Self(Some(bytes)))
    }
}

/// Options of `fathom pager adopt`.
#[derive(Debug, Args)]
#[command(after_help = "\
As `fathom pager attach`, but nothing is injected: the machine has the descriptor of an earlier
pager.
`fathom pager attach` does the same if there is one.

Examples:
  fathom pager adopt web
  fathom pager adopt web --limit 2G
  fathom pager adopt 4711 --json

Exit status: 0 when it has detached or the machine has ended, 1 for a failure, 2 for an invalid
command line.")]
pub struct AdoptCommand {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    work: WorkArguments,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom pager detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
All pages that are away come in, and the pager ends. If it is dead, and its guard too, the command
does what they would have done.

Examples:
  fathom pager detach web
  fathom pager detach 4711 --json

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct DetachCommand {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom pager list`.
#[derive(Debug, Args)]
#[command(after_help = "\
STATE is `attached`, `detaching` (the pages that are away come in), `detached`, `orphaned` (attached,
and the pager is dead: adopt it) or `ended` (the machine has). RESIDENT is what of the guest's memory
is in the host's, LIMIT the most that is to be, AWAY the pages that have left, PACKED the memory
that they take now, and FILE the part of the swap file. REGISTERED is the memory whose faults the kernel reports to the pager, by its own
account. SHADOW is what is copied and protected now, WRITES the guest's writes to such pages, and
MISMATCH the pages that differed from a valid copy: none, unless something writes to the guest's
memory that the pager does not know.

Examples:
  fathom pager list
  fathom pager list --json | jq '.[] | {process, state, faults: .counts.faults}'

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.")]
pub struct ListCommand {
    #[command(flatten)]
    folder: Folder,
    #[command(flatten)]
    format: Format,
}

/// The processes that a pager starts.
#[derive(Debug, Args)]
pub struct PagerHelper {
    #[command(subcommand)]
    helper: Helper,
}

#[derive(Debug, Subcommand)]
enum Helper {
    /// Has a thread make a system call
    Inject { thread: i32, number: u64, first: u64, second: u64, third: u64 },
    /// Waits for its pager's end
    Guard,
    /// Removes what is left of machines that have ended
    Clean { leases: PathBuf, swap: Option<PathBuf> },
}

impl PagerHelper {
    /// Carries the helper's task out.
    pub fn run(&self) -> ExitCode {
        match &self.helper {
            &Helper::Inject { thread, number, first, second, third } => {
                let call = SystemCall { number, arguments: [first, second, third] };
                let report = fathom_attach::inject(thread, call, &mut |_| {});
                ExitCode::from(u8::from(output::json(&report).is_err()))
            }
            Helper::Guard => ExitCode::from(u8::from(fathom_attach::guard().is_err())),
            Helper::Clean { leases, swap } => {
                fathom_attach::clean(leases, swap.as_deref());
                ExitCode::SUCCESS
            }
        }
    }
}

/// Carries out `fathom pager attach`.
pub fn attach(command: &AttachCommand) -> CommandResult {
    let (target, work) = (&command.target, &command.work);
    run(target, work, command.qmp.clone(), false, command.format.json)
}

/// Carries out `fathom pager adopt`.
pub fn adopt(command: &AdoptCommand) -> CommandResult {
    run(&command.target, &command.work, None, true, command.format.json)
}

/// Carries out `fathom pager limit`.
pub fn limit(command: &LimitCommand) -> CommandResult {
    let Limit(limit) = command.limit;
    at_least(limit.unwrap_or(LIMIT_BYTES_MIN), LIMIT_BYTES_MIN, "a limit")?;
    let vmm = find(&command.target.machine)?;
    let folder = &command.target.folder.folder;
    let request = Request::Limit(limit.unwrap_or(0));
    let status = fathom_attach::ask(folder, vmm.process(), request).map_err(|error| {
        Failure::new(format!("the pager of process {} does not answer: {error}", vmm.process()))
            .advise("see whether there is one: fathom pager list")
    })?;
    if !status.refused.is_empty() {
        let reason = fathom_failure::text::foreign(&status.refused);
        return Err(Failure::new(format!("the limit was not set: {reason}")));
    }
    if command.format.json {
        return output::json(&status);
    }
    let eviction = &status.eviction;
    let limit = limit.map_or_else(|| "no limit".to_owned(), |bytes| Bytes(bytes).to_string());
    output::text_line(&format!(
        "process {}: {limit}; {} resident, {} away",
        status.process,
        Bytes(eviction.resident_bytes),
        Bytes(eviction.away_bytes)
    ))
}

/// Carries out `fathom pager detach`.
pub fn detach(command: &DetachCommand) -> CommandResult {
    let folder = &command.target.folder.folder;
    let vmm = find(&command.target.machine)?;
    let mut progress = None;
    let mut wait = |status: &PagerStatus| {
        let away = status.eviction.away_bytes;
        let (first, progress) = progress.get_or_insert_with(|| {
            let progress = Progress::new("Bringing pages in", away).silent(command.format.json);
            (away, progress)
        });
        progress.update(first.saturating_sub(away));
    };
    let status = match fathom_attach::ask_to_detach(folder, vmm.process(), &mut wait) {
        Ok(status) => status,
        // It is dead: whoever locks the record is the only one.
        Err(_) => match fathom_attach::detach_orphan(&vmm, folder)? {
            Some(status) => status,
            None => detach_adopted(vmm, folder)?,
        },
    };
    drop(progress);
    if status.state == "orphaned" {
        report(&status, command.format.json)?;
        let text = format!("{} of its memory cannot come in", Bytes(status.eviction.away_bytes));
        return Err(Failure::new(text).advise(
            "its guard serves on; see `damaged` in `fathom pager list --json`, and whether the \
             machine's memory group has room",
        ));
    }
    report(&status, command.format.json)
}

/// Brings the pages in that a pager has left, and detaches.
fn detach_adopted(vmm: Vmm, folder: &Path) -> CommandResult<PagerStatus> {
    let mut pager = fathom_attach::attach(vmm, &options(folder, None, true), &mut |_| {})?;
    pager.allow_eviction(EvictionOptions {
        leases: PathBuf::from(LEASE_FOLDER),
        store: PathBuf::from(STORE_FOLDER),
        swap: None,
        ask: Arc::new(|| {}),
    })?;
    let failed = |error: std::io::Error| Failure::new(format!("the pager cannot serve: {error}"));
    // It is asked to detach before it begins.
    let (stop, mut asker) = UnixStream::pair().map_err(failed)?;
    asker.write_all(&[0]).map_err(failed)?;
    pager.serve(stop.as_fd()).map_err(failed)?;
    Ok(pager.detach())
}

/// Carries out `fathom pager list`.
pub fn list(command: &ListCommand) -> CommandResult {
    let folder = &command.folder.folder;
    let found = fathom_attach::list(folder).map_err(|error| Failure::io("read", folder, &error))?;
    if command.format.json {
        return output::json(&found);
    }
    if found.is_empty() {
        return output::text_line("No machine has or had a pager.");
    }
    let table = table(&found).render(output::width(), Style::stdout());
    output::text_line(&format!("{}{}", table.trim_end_matches('\n'), notes(&found)))
}

fn table(found: &[PagerStatus]) -> Table {
    let mut table = Table::new([
        TableColumn::number("PROCESS"),
        TableColumn::text("STATE"),
        TableColumn::number("PAGER").importance(1),
        TableColumn::number("MEMORY").importance(1),
        TableColumn::number("REGISTERED").importance(0),
        TableColumn::number("RESIDENT"),
        TableColumn::number("LIMIT"),
        TableColumn::number("AWAY"),
        TableColumn::number("PACKED").importance(3),
        TableColumn::number("FILE").importance(2),
        TableColumn::number("FAULTS"),
        TableColumn::number("ZEROED").importance(0),
        TableColumn::number("P50").importance(2),
        TableColumn::number("P99"),
        TableColumn::number("SHADOW").importance(0),
        TableColumn::number("WRITES").importance(0),
        TableColumn::number("MISMATCH").importance(1),
    ]);
    let size = |bytes: u64| if bytes == 0 { "-".to_owned() } else { Bytes(bytes).to_string() };
    for status in found {
        let (counts, shadow, eviction) = (&status.counts, &status.shadow, &status.eviction);
        let percentile = |percent| output::latency(counts.fault_ns.percentile(percent));
        table.row([
            status.process.to_string(),
            status.state.clone(),
            if status.pager == 0 { "-".into() } else { status.pager.to_string() },
            Bytes(status.memory_bytes).to_string(),
            Bytes(status.registered_bytes).to_string(),
            size(eviction.resident_bytes),
            size(eviction.limit_bytes),
            size(eviction.away_bytes),
            size(eviction.store_bytes),
            size(eviction.file_bytes),
            counts.faults.to_string(),
            Bytes(counts.zeroed_bytes).to_string(),
            percentile(50.0),
            percentile(99.0),
            if shadow.budget_bytes == 0 {
                "-".into()
            } else {
                Bytes(shadow.copied_bytes).to_string()
            },
            shadow.write_faults.to_string(),
            shadow.mismatches.to_string(),
        ]);
    }
    table
}

/// Why a guest is above its limit.
fn over_the_limit(status: &PagerStatus) -> String {
    let counts = &status.eviction;
    let reasons = [
        (counts.incompressible, "do not become smaller"),
        (counts.leased, "are in use by the daemon"),
        (counts.large, "are parts of large folios"),
        (counts.full, "found no room in the folder of pages (--pages)"),
    ];
    let most = reasons.into_iter().max_by_key(|(count, _)| *count).filter(|(count, _)| *count > 0);
    let reason = most.map_or_else(
        || "pages leave, or the guest uses them".to_owned(),
        |(count, reason)| format!("pages {reason} ({count} times)"),
    );
    format!("\nprocess {}: above its limit: {reason}", status.process)
}

/// What the table has no column for.
fn notes(found: &[PagerStatus]) -> String {
    let note = |status: &PagerStatus| {
        let (shadow, eviction) = (&status.shadow, &status.eviction);
        let has_limit = eviction.limit_bytes > 0;
        let reasons = [
            ("no page could leave", &shadow.obstacle, shadow.suspended.is_empty()),
            ("no shadow", &shadow.suspended, true),
            ("no page leaves", &eviction.obstacle, has_limit && eviction.retreat.is_empty()),
            ("nothing goes to the swap file", &eviction.file_obstacle, true),
            ("all pages come in", &eviction.retreat, has_limit || eviction.away_bytes > 0),
        ];
        let is_said =
            |(_, reason, is_shown): &(&str, &String, bool)| *is_shown && !reason.is_empty();
        let said = reasons.into_iter().filter(is_said).map(|(what, reason, _)| {
            let reason = fathom_failure::text::foreign(reason);
            format!("\nprocess {}: {what}: {reason}", status.process)
        });
        let mut text: String = said.collect();
        if has_limit && eviction.resident_bytes > eviction.limit_bytes && text.is_empty() {
            text = over_the_limit(status);
        }
        if status.state == "orphaned" && eviction.away_bytes > 0 {
            text +=
                &format!("\nprocess {}: its guard serves: fathom pager adopt {0}", status.process);
        }
        if eviction.existing > EXISTING_PAGES_MAX {
            text += &format!(
                "\nprocess {}: another process has touched {} pages that were away: the guest may have \
                 read zeroes",
                status.process, eviction.existing
            );
        }
        if eviction.damaged > 0 {
            let process = status.process;
            text += &format!(
                "\nprocess {process}: {} pages are damaged: the guest gets an error for them",
                eviction.damaged
            );
        }
        text
    };
    found.iter().map(note).collect()
}

fn options(folder: &Path, qmp: Option<PathBuf>, must_adopt: bool) -> AttachOptions {
    // This program, even if its file has been replaced since.
    let program = PathBuf::from("/proc/self/exe");
    let helper = |name: &str| vec![HELPER.into(), name.into()];
    let [injector, guard, cleaner] = ["inject", "guard", "clean"].map(helper);
    let helpers = Helpers { program, injector, guard, cleaner };
    AttachOptions { folder: folder.to_owned(), qmp, helpers, must_adopt }
}

/// Is a pager: attaches, serves, detaches.
fn run(
    target: &Target,
    work: &WorkArguments,
    qmp: Option<PathBuf>,
    must_adopt: bool,
    json: bool,
) -> CommandResult {
    let folder = &target.folder.folder;
    let options = options(folder, qmp, must_adopt);
    work.check()?;
    // Without it, the kernel might end the pager first when memory is short. Root may do it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let vmm = find(&target.machine)?;
    let process = vmm.process();
    let mut pager = fathom_attach::attach(vmm, &options, &mut |_| {})?;
    if let Err(failure) = work.start(&mut pager) {
        pager.detach();
        return Err(failure);
    }
    let end = serve(&mut pager, folder, process, json);
    let (control, end) = match end {
        Ok(served) => served,
        Err(failure) => {
            pager.detach();
            return Err(failure);
        }
    };
    let status = pager.detach();
    control.end(&status);
    report(&status, json)?;
    match end {
        _ if status.state == "orphaned" => Err(Failure::new("not all pages have come in")
            .advise("its guard serves; see `fathom pager list`")),
        ServeEnd::Asked | ServeEnd::VmmEnded => Ok(()),
        ServeEnd::Unguarded => Err(Failure::new("it has detached: its guard cannot be started")
            .advise("see whether this user may start more processes")),
    }
}

fn serve(
    pager: &mut Pager,
    folder: &Path,
    process: i32,
    json: bool,
) -> CommandResult<(Control, ServeEnd)> {
    let failed = |error: std::io::Error| Failure::new(format!("the pager cannot serve: {error}"));
    let (control, signal) =
        Control::start(folder, process, pager.status(), pager.limit()).map_err(failed)?;
    for number in [SIGTERM, SIGINT] {
        let signal: UnixStream = signal.try_clone().map_err(failed)?;
        signal_hook::low_level::pipe::register(number, signal).map_err(failed)?;
    }
    let status = pager.status().lock().clone();
    report(&status, json)?;
    let end = pager.serve(control.as_fd()).map_err(failed)?;
    Ok((control, end))
}

/// What has become of a machine, in a line.
fn report(status: &PagerStatus, json: bool) -> CommandResult {
    if json {
        return output::json(status);
    }
    let counts = &status.counts;
    let text = match (status.state.as_str(), status.is_adopted) {
        ("attached", true) => {
            format!("{} of its memory registered; nothing injected", Bytes(status.memory_bytes))
        }
        ("attached", false) => format!(
            "{} of its memory registered; its main thread stood still for {}",
            Bytes(status.memory_bytes),
            output::latency(status.pause_ns)
        ),
        _ => format!("{} faults served, {} of zeroes", counts.faults, Bytes(counts.zeroed_bytes)),
    };
    output::text_line(&format!("process {}: {}: {text}", status.process, status.state))
}

/// The machine with this process or name.
fn find(machine: &str) -> CommandResult<Vmm> {
    if let Ok(process) = machine.parse() {
        return Ok(Vmm::open(process)?);
    }
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_it = |process: &i32| {
        let command = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        command.len() <= COMMAND_BYTES_MAX && is_named(&command, machine)
    };
    let found: Vec<i32> = processes.filter(is_it).collect();
    match found[..] {
        [process] => Ok(Vmm::open(process)?),
        [] => Err(Failure::new(format!("no machine is called {machine:?}"))
            .advise("give the number of its QEMU's process")),
        _ => Err(Failure::new(format!("several machines are called {machine:?}: {found:?}"))
            .advise("give the number of one's process")),
    }
}

/// Whether a command line, of words that end with a zero, has `-name NAME` or `-name guest=NAME`.
fn is_named(command: &[u8], name: &str) -> bool {
    let mut words = command.split(|byte| *byte == 0);
    while let Some(word) = words.next() {
        if word != b"-name" && word != b"--name" {
            continue;
        }
        let Some(value) = words.next() else { return false };
        let value = String::from_utf8_lossy(value).into_owned();
        let mut parts = value.split(',');
        let first = parts.next().unwrap_or_default();
        let first = first.strip_prefix("guest=").unwrap_or(first);
        return first == name || parts.any(|part| part.strip_prefix("guest=") == Some(name));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_found_by_its_name() {
        let line = |name: &str| format!("qemu\0-m\0web\0-name\0{name}\0-daemonize\0").into_bytes();
        assert!(is_named(&line("web"), "web"));
        assert!(is_named(&line("guest=web,debug-threads=on"), "web"));
        assert!(is_named(&line("debug-threads=on,guest=web"), "web"));
        assert!(!is_named(&line("guest=webshop"), "web"));
        assert!(!is_named(b"qemu\0-m\0web\0", "web"));
        assert!(!is_named(b"qemu\0-name", ""));
    }

    #[test]
    fn the_list_fits_a_terminal() {
        let status = PagerStatus {
            process: 4_194_303,
            pager: 4_194_304,
            state: "attached".into(),
            memory_bytes: 512 << 30,
            registered_bytes: 512 << 30,
            eviction: fathom_attach::EvictionCounts {
                limit_bytes: 200 << 30,
                resident_bytes: 199 << 30,
                away_bytes: 300 << 30,
                store_bytes: 111 << 30,
                ..Default::default()
            },
            ..PagerStatus::default()
        };
        let text = table(&[status]).render(Some(80), Style::PLAIN);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        for word in ["4194303", "attached", "199 GiB", "200 GiB", "300 GiB"] {
            assert!(text.contains(word), "{text}");
        }
    }
}
