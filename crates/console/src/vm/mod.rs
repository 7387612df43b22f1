//! `fathom vm`: runs a stock QEMU with Fathom's disks.

pub mod accelerator;
mod command;
mod embedded;
pub mod qemu;

use std::{
    path::{Path, PathBuf},
    process::{Child, Command},
};

use clap::Args;
use fathom_control::{Bytes, Client, DiskStatus, FrontendStatus, ImageFormat};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

use crate::{
    connection::ControlOptions,
    disk::absolute,
    failure::{CommandResult, Failure, reason},
    output::{
        self, Format,
        style::{self, Style},
    },
    process::spawn_bound,
};
use accelerator::{Accelerator, AcceleratorChoice};
use command::{Machine, QemuDisk};
pub use embedded::{Daemon, Embedded, ServedImage};
use qemu::{Qemu, VERSION_MIN};

/// Options of `fathom vm`.
#[derive(Debug, Args)]
#[command(after_help = "\
Disks are attached in the order of the command line: those of --disk first, then those of --image.
If the running daemon does not serve an image, a new daemon is started for it, which ends with the
virtual machine.

Examples:
  fathom vm --image root.img                          boot an image, the console in this terminal
  fathom vm --disk root --disk data --memory 4G       two disks of the running daemon
  fathom vm --image root.img --kernel vmlinuz --initrd initrd.img \\
            --append 'console=ttyS0 root=/dev/vda'
  fathom vm --disk root --print                       only print QEMU's command line
  fathom vm --disk root --accel tcg --intercept /run/fathom/intercept.sock
  fathom vm --image root.img -- -nographic -snapshot  options for QEMU itself

The exit status is QEMU's.")]
pub struct VmOptions {
    /// A disk of the running daemon by name, or a vhost-user socket; may be repeated
    #[arg(long, value_name = "NAME|SOCKET")]
    disk: Vec<String>,
    /// A raw image; may be repeated
    #[arg(long, value_name = "PATH")]
    image: Vec<PathBuf>,
    /// Serve the images' bytes as they are (raw), even if they look like another format
    #[arg(long = "format", value_name = "FORMAT", requires = "image")]
    image_format: Option<ImageFormat>,
    /// Serve the images read-only
    #[arg(long, requires = "image")]
    read_only: bool,
    /// Print the command line instead of running it
    #[arg(long)]
    print: bool,
    /// The virtual machine's name
    #[arg(long, default_value = "fathom")]
    name: String,
    /// Memory
    #[arg(long, short, value_name = "SIZE", default_value = "1G")]
    memory: Bytes,
    /// Virtual processors
    #[arg(long, short, value_name = "N", default_value_t = 2)]
    cpus: u16,
    /// Queues of each disk [default: the number of processors, at most the disk's queues]
    #[arg(long, value_name = "N")]
    queues: Option<u16>,
    /// A Linux kernel to boot, instead of the first disk
    #[arg(long, value_name = "PATH")]
    kernel: Option<PathBuf>,
    /// The kernel's initial RAM disk
    #[arg(long, value_name = "PATH", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// The kernel's command line [default: the console on the serial line]
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    append: Option<String>,
    /// QEMU's machine type [default: q35 on x86, virt elsewhere]
    #[arg(long, value_name = "TYPE")]
    machine: Option<String>,
    /// The accelerator of the guest
    #[arg(long, value_enum, default_value = "auto")]
    accel: AcceleratorChoice,
    /// QEMU's processor model [default: host under KVM, max under TCG]
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
    /// The QEMU to start [default: qemu-system-ARCHITECTURE]
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    #[arg(
        long,
        help = "Where the serial line goes: mon:stdio, none, file:PATH, … as in QEMU",
        value_name = "DEVICE"
    )]
    serial: Option<String>,
    #[arg(
        long,
        help = "The screen: none, gtk, vnc=:1, … as in QEMU",
        value_name = "KIND",
        default_value = "none"
    )]
    display: String,
    /// The network, as in QEMU's -nic, or none
    #[arg(long, value_name = "NIC", default_value = "user,model=virtio-net-pci")]
    network: String,
    /// A socket for QEMU's machine protocol
    #[arg(long, value_name = "PATH")]
    qmp: Option<PathBuf>,
    /// Let the daemon learn which process of the guest writes which data, through the socket that
    /// its configuration has in `intercept`; only for emulated guests
    #[arg(long, value_name = "SOCKET", requires = "disk")]
    intercept: Option<PathBuf>,
    /// Leave QEMU running in the background
    #[arg(long)]
    daemonize: bool,
    /// Further options for QEMU, after --
    #[arg(last = true, value_name = "QEMU OPTIONS")]
    extra: Vec<String>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// The output of `--print --json`.
#[derive(Serialize)]
struct Printed {
    qemu_version: String,
    accelerator: Accelerator,
    accelerator_reason: Option<String>,
    serve: Vec<Vec<String>>,
    command: Vec<String>,
}

/// Carries out the command; the result is QEMU's exit status.
pub fn run(options: &VmOptions) -> CommandResult<u8> {
    if options.format.json && !options.print {
        return Err(Failure::usage("--json requires --print"));
    }
    if options.memory.0 < 1 << 20 || options.cpus == 0 || options.queues == Some(0) {
        return Err(Failure::usage("a machine needs memory, processors and queues"));
    }
    let qemu = Qemu::find(options.qemu.as_deref())?;
    if qemu.version < VERSION_MIN {
        return Err(Failure::new(format!("{} is too old", qemu.version_text))
            .advise("QEMU 7.2 is the oldest that Fathom is tested with"));
    }
    let client = options.control.client();
    let mut disks = Vec::new();
    for word in &options.disk {
        disks.push(named_disk(&client, word, options)?);
    }
    let mut embedded = Embedded::new("vm");
    for image in &options.image {
        disks.push(match served_image(&client, image, options)? {
            Some(disk) => disk,
            None => embedded.add(ServedImage {
                image: image.clone(),
                queues: options.queues.unwrap_or(options.cpus),
                read_only: options.read_only,
                format: options.image_format,
                direct: false,
                tap: true,
            })?,
        });
    }
    if options.daemonize && !embedded.is_empty() {
        return Err(Failure::usage("with --daemonize the images' daemon would never be ended")
            .advise(
                "serve them with `fathom serve` or `fathom disk add`, and name them with --disk",
            ));
    }
    let (accelerator, why_not_kvm) = accelerator::choose(options.accel, &qemu);
    let mut machine = machine(options, qemu, accelerator, disks);
    if let Some(socket) = &options.intercept {
        machine.plugin = Some(plugin(socket, accelerator)?);
    }
    if options.print {
        return print(options, &machine, why_not_kvm, &embedded).map(|()| 0);
    }
    if let Some(reason) = &why_not_kvm {
        let style = Style::stderr();
        note!("{} guests run emulated: {reason}", style.paint(style::DIM, "note:"));
    }
    let daemon = embedded.start()?;
    let status = start(&machine)?;
    if let Some(daemon) = daemon {
        daemon.end();
    }
    Ok(status)
}

fn machine(
    options: &VmOptions,
    qemu: Qemu,
    accelerator: Accelerator,
    disks: Vec<QemuDisk>,
) -> Machine {
    let kind = if qemu.is_x86() { "q35" } else { "virt" };
    let serial = if options.daemonize { "null" } else { "mon:stdio" };
    Machine {
        accelerator,
        plugin: None,
        name: options.name.clone(),
        kind: options.machine.clone().unwrap_or_else(|| kind.into()),
        cpu: options.cpu.clone(),
        cpus: options.cpus,
        memory_mib: options.memory.0.div_ceil(1 << 20),
        disks,
        kernel: options.kernel.clone(),
        initrd: options.initrd.clone(),
        append: options.append.clone(),
        serial: options.serial.clone().unwrap_or_else(|| serial.into()),
        display: options.display.clone(),
        network: options.network.clone(),
        qmp: options.qmp.clone(),
        daemonize: options.daemonize,
        extra: options.extra.clone(),
        qemu,
    }
}

/// The plugin that intercepts a guest, with its argument.
fn plugin(socket: &Path, accelerator: Accelerator) -> CommandResult<String> {
    const NAME: &str = "libfathom_intercept_qemu.so";
    if accelerator != Accelerator::Tcg {
        return Err(Failure::new("guests under KVM cannot be intercepted")
            .advise("add `--accel tcg`, or leave --intercept out"));
    }
    let program = std::env::current_exe().ok();
    let beside = program.as_deref().and_then(Path::parent).map(|folder| folder.join(NAME));
    let found = beside.into_iter().chain([Path::new("/usr/lib/fathom").join(NAME)]);
    let plugin = found.into_iter().find(|path| path.exists()).ok_or_else(|| {
        Failure::new(format!("there is no {NAME}")).advise(
            "`make build` makes it beside the program `fathom`; or copy it to /usr/lib/fathom",
        )
    })?;
    let escaped = |path: &Path| path.display().to_string().replace(',', ",,");
    Ok(format!("{},socket={}", escaped(&plugin), escaped(&absolute(socket))))
}

fn print(
    options: &VmOptions,
    machine: &Machine,
    accelerator_reason: Option<String>,
    embedded: &Embedded,
) -> CommandResult {
    if options.format.json {
        return output::json(&Printed {
            qemu_version: machine.qemu.version_text.clone(),
            accelerator: machine.accelerator,
            accelerator_reason,
            serve: embedded.commands(),
            command: machine.words(),
        });
    }
    let mut text = String::new();
    if let Some(reason) = accelerator_reason {
        text += &format!("# Emulated: {reason}.\n");
    }
    for (index, words) in embedded.commands().iter().enumerate() {
        let words: Vec<String> = words.iter().map(|word| command::quote(word)).collect();
        let background = if index == 0 { " &" } else { "" };
        text += &format!("{}{background}\n", words.join(" "));
    }
    output::text_line(&(text + &machine.shell()))
}

/// A disk by its name, or by its socket.
fn named_disk(client: &Client, word: &str, options: &VmOptions) -> CommandResult<QemuDisk> {
    if word.contains('/') {
        let queues = options.queues.unwrap_or(options.cpus);
        return Ok(QemuDisk { socket: absolute(Path::new(word)), queues });
    }
    let status = client.disk(word)?;
    attach(&status, options).ok_or_else(|| {
        Failure::new(format!("disk {word:?} has no vhost-user socket"))
            .advise("give it one: in the configuration, or with `fathom disk add … --socket PATH`")
    })?
}

/// The running daemon's disk with this image, if there is one.
fn served_image(
    client: &Client,
    image: &Path,
    options: &VmOptions,
) -> CommandResult<Option<QemuDisk>> {
    let Ok(disks) = client.disks() else { return Ok(None) };
    let image = std::fs::canonicalize(image).map_err(|e| Failure::io("open", image, &e))?;
    let serves = |disk: &&DiskStatus| {
        let served = disk.backend.image.as_ref().and_then(|path| std::fs::canonicalize(path).ok());
        served.as_deref() == Some(&image)
    };
    disks.disks.iter().find(serves).and_then(|disk| attach(disk, options)).transpose()
}

/// The disk's socket. An error if a guest is connected to it; `None` if it has no socket.
fn attach(status: &DiskStatus, options: &VmOptions) -> Option<CommandResult<QemuDisk>> {
    status.frontends.iter().find_map(|frontend| {
        let FrontendStatus::VhostUser(socket) = frontend else { return None };
        if socket.connected && !options.print {
            return Some(Err(Failure::new(format!("disk {:?} already has a guest", status.name))
                .advise("stop that virtual machine, or use another disk")));
        }
        // QEMU requests at most as many queues as the disk has.
        let queues = options.queues.unwrap_or(options.cpus.min(socket.queues_max)).max(1);
        Some(Ok(QemuDisk { socket: PathBuf::from(&socket.socket), queues }))
    })
}

/// Runs QEMU in this terminal until it ends.
fn start(machine: &Machine) -> CommandResult<u8> {
    let words = machine.words();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    let mut child = spawn_bound(&mut command).map_err(|error| {
        Failure::new(format!("{} does not start: {}", words[0], reason(&error)))
    })?;
    pass_signals_on(&child)
        .map_err(|error| Failure::new(format!("cannot pass signals on: {error}")))?;
    let status = child.wait().map_err(|e| Failure::new(format!("cannot wait for QEMU: {e}")))?;
    Ok(status.code().map_or(crate::failure::FAILED, |code| code as u8))
}

/// Forwards signals that would end this process to QEMU, for the rest of this process's life.
/// Ctrl-C reaches QEMU directly, and QEMU or the guest handles it.
fn pass_signals_on(qemu: &Child) -> std::io::Result<()> {
    // The descriptor identifies the process even after it has ended and its ID is reused.
    let process = Pid::from_child(qemu);
    let process = pidfd_open(process, PidfdFlags::empty())?;
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let pass_on = move || {
        for signal in signals.forever() {
            if signal != SIGINT && pidfd_send_signal(&process, Signal::TERM).is_err() {
                // QEMU has ended, and this process will end as well.
                let _ = emulate_default_handler(signal);
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(pass_on).map(drop)
}
