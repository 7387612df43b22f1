//! The parameters of a guest, and QEMU's command line for it.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::guest::Guest;
use crate::process::Process;
use crate::{Assets, Kernel, Qemu, Result, accelerator, until};

/// How often a guest is started. On a busy machine, an emulating QEMU with several processors
/// sometimes fails an assertion of its own while the guest sets its devices up (`iotlb_to_section`,
/// `msix_table_mmio_write`).
const STARTS_MAX: u32 = 3;

/// A disk of a guest.
#[derive(Debug, Clone)]
pub struct Disk {
    kind: Kind,
    properties: String,
}

#[derive(Debug, Clone)]
enum Kind {
    VhostUser { socket: PathBuf, queues: u32 },
    File { image: PathBuf, snapshot: bool },
}

impl Disk {
    /// A disk that a vhost-user server offers on a socket; one queue.
    pub fn vhost_user(socket: impl Into<PathBuf>) -> Self {
        let kind = Kind::VhostUser { socket: socket.into(), queues: 1 };
        Self { kind, properties: String::new() }
    }

    /// A raw image that QEMU opens itself.
    pub fn file(image: impl Into<PathBuf>) -> Self {
        let kind = Kind::File { image: image.into(), snapshot: false };
        Self { kind, properties: String::new() }
    }

    /// A raw image that QEMU opens itself. The guest's writes are discarded at the end.
    pub fn snapshot_of(image: impl Into<PathBuf>) -> Self {
        let kind = Kind::File { image: image.into(), snapshot: true };
        Self { kind, properties: String::new() }
    }

    /// Sets the number of queues of a vhost-user disk.
    #[must_use]
    pub fn queues(mut self, number: u32) -> Self {
        if let Kind::VhostUser { queues, .. } = &mut self.kind {
            *queues = number;
        }
        self
    }

    /// Adds a property of QEMU's device, such as `queue-size=256` or `config-wce=off`.
    #[must_use]
    pub fn property(mut self, text: &str) -> Self {
        self.properties.push(',');
        self.properties.push_str(text);
        self
    }
}

/// The description of a guest before its start.
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    qemu: Option<Qemu>,
    kernel: Option<Kernel>,
    machine: String,
    memory_mib: u32,
    processors: Option<u32>,
    root: Option<Disk>,
    disks: Vec<Disk>,
    append: String,
    arguments: Vec<String>,
    incoming: Option<String>,
    ready_seconds: u64,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            qemu: None,
            kernel: None,
            machine: "q35".to_owned(),
            memory_mib: 512,
            processors: None,
            root: None,
            disks: Vec::new(),
            append: String::new(),
            arguments: Vec::new(),
            incoming: None,
            ready_seconds: 90,
        }
    }
}

impl Builder {
    /// Sets the QEMU to use instead of the one on `PATH`.
    pub fn qemu(mut self, qemu: Qemu) -> Self {
        self.qemu = Some(qemu);
        self
    }

    /// Sets the kernel to use instead of that of the host's Debian release. The guest needs a
    /// [root](Self::root) disk.
    pub fn kernel(mut self, kernel: Kernel) -> Self {
        self.kernel = Some(kernel);
        self
    }

    /// Sets the machine type instead of `q35`, for example `pc-q35-7.2`, with which a guest can
    /// migrate between two QEMU versions.
    pub fn machine(mut self, name: &str) -> Self {
        name.clone_into(&mut self.machine);
        self
    }

    /// Sets the guest's memory, in MiB; 512 by default.
    pub fn memory_mib(mut self, size: u32) -> Self {
        self.memory_mib = size;
        self
    }

    /// Sets the number of the guest's processors. Without it, there are as many as the disk with
    /// most queues has queues: the guest uses one for each processor. Two emulated processors take
    /// up to 60 % more of the host's than one for the same work, because they wait for each other.
    pub fn processors(mut self, number: u32) -> Self {
        self.processors = Some(number);
        self
    }

    /// Sets the disk to boot from, `/dev/vda`, which must have the root image. Without it the
    /// initrd is the system.
    pub fn root(mut self, disk: Disk) -> Self {
        self.root = Some(disk);
        self
    }

    /// Adds a disk. The first is `/dev/vda`, or `/dev/vdb` after a root disk, and so on.
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// Appends `text` to the kernel's command line.
    pub fn append(mut self, text: &str) -> Self {
        self.append.push(' ');
        self.append.push_str(text);
        self
    }

    /// Adds an argument of QEMU.
    pub fn argument(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Makes the guest wait for a migration on this address, such as `unix:/path`.
    pub fn incoming(mut self, address: &str) -> Self {
        self.incoming = Some(address.to_owned());
        self
    }

    /// Sets the time limit for the guest's boot; 90 s by default.
    pub fn ready_within(mut self, seconds: u64) -> Self {
        self.ready_seconds = seconds;
        self
    }

    /// Starts the guest and waits until it accepts commands. A guest that waits for a migration is
    /// only started.
    ///
    /// # Errors
    /// When QEMU does not start or the guest does not boot; with the end of its console.
    pub fn start(self) -> Result<Guest> {
        let qemu = match &self.qemu {
            Some(qemu) => qemu.clone(),
            None => Qemu::current()?,
        };
        let mut starts = 1;
        loop {
            let guest = self.start_once(&qemu)?;
            if let Some(address) = &self.incoming {
                let socket = address.strip_prefix("unix:").map(Path::new);
                until("QEMU to wait for a migration", crate::patience(30), || {
                    guest.process().expect_running()?;
                    Ok(socket.is_none_or(Path::exists).then_some(()))
                })?;
                return Ok(guest);
            }
            match guest.wait_until_ready(1, crate::patience(self.ready_seconds)) {
                Err(error)
                    if starts < STARTS_MAX
                        && (guest.process().has_aborted() || error.is_of_emulation()) =>
                {
                    println!("QEMU is started again: {error}");
                    starts += 1;
                }
                // An emulated guest may lose the interrupts of its serial port ("No irq handler for
                // vector").
                Ok(()) if starts < STARTS_MAX && !guest.answers(crate::patience(20)) => {
                    println!("QEMU is started again: the guest does not answer");
                    starts += 1;
                }
                ready => return ready.map(|()| guest),
            }
        }
    }

    fn start_once(&self, qemu: &Qemu) -> Result<Guest> {
        let directory = tempfile::tempdir()?;
        let arguments = self.command_line(qemu, &directory)?;
        let log = directory.path().join("qemu.log");
        let process = Process::start(qemu.binary(), &arguments, &log)?;
        Guest::new(process, directory)
    }

    fn command_line(&self, qemu: &Qemu, directory: &TempDir) -> Result<Vec<String>> {
        let assets = Assets::get()?;
        let accelerator = accelerator()?;
        // Under emulation `rep movsb` copies byte by byte. A guest whose processor announces it as
        // fast uses it for all copies, and takes a sixth more processor time.
        let model = if accelerator.starts_with("kvm") { "host" } else { "max,erms=off,fsrm=off" };
        let path = |name: &str| directory.path().join(name).display().to_string();
        let memory = self.memory_mib;
        let queues = self.root.iter().chain(&self.disks).map(Disk::queue_count);
        let processors = self.processors.unwrap_or_else(|| queues.max().unwrap_or(1));
        let mut line: Vec<String> = Vec::new();
        let mut add = |parts: &[&str]| line.extend(parts.iter().map(|part| (*part).to_owned()));

        add(&["-nodefaults", "-display", "none", "-accel", accelerator, "-cpu", model]);
        add(&["-machine", &format!("{},memory-backend=memory", self.machine)]);
        add(&["-object"]);
        add(&[&format!("memory-backend-memfd,id=memory,size={memory}M,share=on")]);
        add(&["-m", &format!("{memory}M"), "-smp", &processors.to_string()]);
        add(&["-serial", &format!("file:{}", path("console"))]);
        add(&["-serial", &format!("unix:{},server=on,wait=off", path("channel"))]);
        add(&["-qmp", &format!("unix:{},server=on,wait=off", path("qmp"))]);
        let (image, initrd) = match &self.kernel {
            Some(kernel) => (&kernel.image, &kernel.initrd),
            None => (&assets.kernel, &assets.initrd),
        };
        add(&["-kernel", &image.display().to_string(), "-initrd", &initrd.display().to_string()]);
        let root = if self.root.is_some() { " root=/dev/vda rw" } else { "" };
        // Only errors and warnings of the kernel are printed on the console. The length of its
        // delays is given, because measuring it takes as long as half of a boot's other work when
        // the host is busy.
        let append = format!(
            "console=ttyS0 loglevel=5 mitigations=off no_timer_check lpj=10000000{root}{}",
            self.append
        );
        add(&["-append", &append]);
        for (index, disk) in self.root.iter().chain(&self.disks).enumerate() {
            for part in disk.arguments(index, qemu) {
                add(&[&part]);
            }
        }
        if let Some(address) = &self.incoming {
            add(&["-incoming", address]);
        }
        line.extend(self.arguments.iter().cloned());
        Ok(line)
    }
}

impl Disk {
    fn queue_count(&self) -> u32 {
        match self.kind {
            Kind::VhostUser { queues, .. } => queues,
            Kind::File { .. } => 1,
        }
    }

    fn arguments(&self, index: usize, qemu: &Qemu) -> [String; 4] {
        let properties = &self.properties;
        match &self.kind {
            Kind::VhostUser { socket, queues } => [
                "-chardev".to_owned(),
                format!(
                    "socket,id=disk{index},path={},{}",
                    escaped(socket),
                    qemu.reconnect_option()
                ),
                "-device".to_owned(),
                format!(
                    "vhost-user-blk-pci,id=device{index},chardev=disk{index},\
                     num-queues={queues}{properties}"
                ),
            ],
            Kind::File { image, snapshot } => [
                "-drive".to_owned(),
                format!(
                    "id=disk{index},if=none,format=raw,snapshot={},file={}",
                    if *snapshot { "on" } else { "off" },
                    escaped(image)
                ),
                "-device".to_owned(),
                format!("virtio-blk-pci,id=device{index},drive=disk{index}{properties}"),
            ],
        }
    }
}

/// A path, escaped for QEMU's option parser.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
