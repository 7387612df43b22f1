//! The pagers of this host: `fathom pager attach`, `adopt`, `detach`, `list`.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use fathom_attach::{
    AttachOptions, Control, FOLDER, Helpers, LEASE_FOLDER, Pager, PagerStatus, Request, ServeEnd,
    ShadowOptions, SystemCall, Vmm,
};
use fathom_control::Bytes;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::{self, Format};

/// The name of the hidden command for the helpers.
const HELPER: &str = "pager-helper";
/// The longest command line in which a machine's name is searched, in bytes.
const COMMAND_BYTES_MAX: usize = 1 << 20;

/// The least memory for copies, in bytes.
const SHADOW_BYTES_MIN: u64 = 1 << 20;

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
SIGTERM or SIGINT. If it is killed, its guard, a second process, leaves the faults to the kernel,
and the machine goes on. Nothing leaves the guest's memory: there is no limit yet.

With --shadow it does all that would take a page away, but for taking it away, and compares: a
mismatch in `fathom pager list` would have been a lost write. The daemon takes leases meanwhile.

Examples:
  fathom pager attach web --qmp /run/web.qmp
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
    shadow: ShadowArguments,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
struct ShadowArguments {
    /// Copy pages that could leave, at most so many bytes, and compare them later
    #[arg(long, value_name = "SIZE")]
    shadow: Option<Bytes>,
    #[command(flatten)]
    control: ControlOptions,
}

impl ShadowArguments {
    /// Has a pager begin, if it was asked for.
    fn start(&self, pager: &mut Pager) -> CommandResult {
        let Some(Bytes(bytes)) = self.shadow else { return Ok(()) };
        if bytes < SHADOW_BYTES_MIN {
            let text = format!("--shadow needs at least {}", Bytes(SHADOW_BYTES_MIN));
            return Err(Failure::new(text).advise("give more memory"));
        }
        let control = self.control.clone();
        let ask = move || {
            // A daemon that does not answer maps no memory, or the pager finds out.
            let _ = control.client().renew_leases();
        };
        let folder = PathBuf::from(LEASE_FOLDER);
        Ok(pager.start_shadow(ShadowOptions { folder, bytes, ask: Arc::new(ask) })?)
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
  fathom pager adopt web --shadow 64M
  fathom pager adopt 4711 --json

Exit status: 0 when it has detached or the machine has ended, 1 for a failure, 2 for an invalid
command line.")]
pub struct AdoptCommand {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    shadow: ShadowArguments,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom pager detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
The pager ends. If it is dead, and its guard too, the command does what they would have done.

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
STATE is `attached`, `detached`, `orphaned` (attached, and the pager is dead: adopt it) or `ended`
(the machine has). REGISTERED is the memory whose faults the kernel reports to the pager, by its
own account. SHADOW is what is copied and protected now, WRITES the guest's writes to such pages, and
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
}

impl PagerHelper {
    /// Carries the helper's task out.
    pub fn run(&self) -> ExitCode {
        match self.helper {
            Helper::Inject { thread, number, first, second, third } => {
                let call = SystemCall { number, arguments: [first, second, third] };
                let report = fathom_attach::inject(thread, call, &mut |_| {});
                ExitCode::from(u8::from(output::json(&report).is_err()))
            }
            Helper::Guard => ExitCode::from(u8::from(fathom_attach::guard().is_err())),
        }
    }
}

/// Carries out `fathom pager attach`.
pub fn attach(command: &AttachCommand) -> CommandResult {
    let (target, shadow) = (&command.target, &command.shadow);
    work(target, shadow, command.qmp.clone(), false, command.format.json)
}

/// Carries out `fathom pager adopt`.
pub fn adopt(command: &AdoptCommand) -> CommandResult {
    work(&command.target, &command.shadow, None, true, command.format.json)
}

/// Carries out `fathom pager detach`.
pub fn detach(command: &DetachCommand) -> CommandResult {
    let folder = &command.target.folder.folder;
    let vmm = find(&command.target.machine)?;
    let status = match fathom_attach::ask(folder, vmm.process(), Request::Detach) {
        Ok(status) => status,
        // It is dead: whoever locks the record is the only one.
        Err(_) => fathom_attach::detach_orphan(&vmm, folder)?,
    };
    report(&status, command.format.json)
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
        TableColumn::number("MEMORY").importance(2),
        TableColumn::number("REGISTERED"),
        TableColumn::number("FAULTS"),
        TableColumn::number("ZEROED").importance(2),
        TableColumn::number("P50").importance(1),
        TableColumn::number("P99"),
        TableColumn::number("SHADOW").importance(2),
        TableColumn::number("WRITES").importance(2),
        TableColumn::number("MISMATCH"),
    ]);
    for status in found {
        let (counts, shadow) = (&status.counts, &status.shadow);
        let percentile = |percent| output::latency(counts.fault_ns.percentile(percent));
        table.row([
            status.process.to_string(),
            status.state.clone(),
            if status.pager == 0 { "-".into() } else { status.pager.to_string() },
            Bytes(status.memory_bytes).to_string(),
            Bytes(status.registered_bytes).to_string(),
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

/// What the table has no column for.
fn notes(found: &[PagerStatus]) -> String {
    let note = |status: &PagerStatus| {
        let shadow = &status.shadow;
        let (what, reason) = match (&*shadow.suspended, &*shadow.obstacle) {
            ("", "") => return String::new(),
            ("", obstacle) => ("no page could leave", obstacle),
            (reason, _) => ("no shadow", reason),
        };
        let reason = fathom_failure::text::foreign(reason);
        format!("\nprocess {}: {what}: {reason}", status.process)
    };
    found.iter().map(note).collect()
}

/// Is a pager: attaches, serves, detaches.
fn work(
    target: &Target,
    shadow: &ShadowArguments,
    qmp: Option<PathBuf>,
    must_adopt: bool,
    json: bool,
) -> CommandResult {
    let folder = &target.folder.folder;
    // This program, even if its file has been replaced since.
    let program = PathBuf::from("/proc/self/exe");
    let helper = |name: &str| vec![HELPER.into(), name.into()];
    let helpers = Helpers { program, injector: helper("inject"), guard: helper("guard") };
    let options = AttachOptions { folder: folder.clone(), qmp, helpers, must_adopt };
    // Without it, the kernel might end the pager first when memory is short. Root may do it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let vmm = find(&target.machine)?;
    let process = vmm.process();
    let mut pager = fathom_attach::attach(vmm, &options, &mut |_| {})?;
    if let Err(failure) = shadow.start(&mut pager) {
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
    let (control, signal) = Control::start(folder, process, pager.status()).map_err(failed)?;
    for number in [SIGTERM, SIGINT] {
        let signal: UnixStream = signal.try_clone().map_err(failed)?;
        signal_hook::low_level::pipe::register(number, signal).map_err(failed)?;
    }
    let status = pager.status().lock().clone();
    report(&status, json)?;
    let end = pager.serve(std::os::fd::AsFd::as_fd(&control)).map_err(failed)?;
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
            ..PagerStatus::default()
        };
        let text = table(&[status]).render(Some(80), Style::PLAIN);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(text.contains("4194303") && text.contains("attached"), "{text}");
    }
}
