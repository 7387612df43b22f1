//! A guest with one classified disk whose requests are logged, for comparison with the truth.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use fathom_tests::{
    Assets, Classified, Comparison, Daemon, Disk, Error, Guest, Result, Served, Truth,
};

use crate::introspection::newest;

/// The folders whose files are written and read by direct I/O.
pub(crate) const DIRECT: &[&str] = &["/direct/", "/upper/direct/"];

/// The name of the kernel with all modules. The environment variable `FATHOM_PLAIN_KERNEL` selects
/// another kernel of `scripts/guest-kernel`, such as `plain-in-bookworm-backports`.
pub(crate) fn kernel() -> String {
    std::env::var("FATHOM_PLAIN_KERNEL").unwrap_or_else(|_| "plain".to_owned())
}

/// The number of processors of a guest with a kernel, and of queues of its disk: the newest kernel
/// runs with two, the others with one, which takes far less time.
pub(crate) fn processors(kernel: &str) -> u32 {
    if kernel == newest() { 2 } else { 1 }
}

/// A guest with one classified disk, `/dev/vdb`.
pub(crate) struct Scene {
    pub daemon: Daemon,
    pub guest: Guest,
    /// The failures so far.
    problems: Vec<String>,
}

impl Scene {
    /// Boots a kernel of `scripts/guest-kernel` with a disk of `mib` MiB. Returns `None` if the
    /// kernel is not available.
    pub fn start(kernel: &str, mib: u64) -> Result<Option<Self>> {
        Self::start_above(kernel, mib, "")
    }

    /// The same with further layers beneath the log, each after a comma.
    pub fn start_above(kernel: &str, mib: u64, layers: &str) -> Result<Option<Self>> {
        Self::start_with(kernel, mib, layers, processors(kernel), "", |_| None, Vec::new())
    }

    /// The same with the plugin for QEMU.
    pub fn start_intercepted(kernel: &str, mib: u64, plugin: &Path) -> Result<Option<Self>> {
        let processors = processors(kernel);
        Self::start_intercepted_above(kernel, mib, plugin, "", processors, "", Vec::new())
    }

    /// The same with further layers, each after a comma, a number of processors, further tables of
    /// the configuration, and further disks: the first is `/dev/vdc`.
    pub fn start_intercepted_above(
        kernel: &str,
        mib: u64,
        plugin: &Path,
        layers: &str,
        processors: u32,
        tables: &str,
        disks: Vec<Disk>,
    ) -> Result<Option<Self>> {
        let table = format!("[intercept]\nsocket = 'intercept.sock'\n{tables}");
        let argument = |daemon: &Daemon| {
            let socket = daemon.path("intercept.sock");
            Some(format!("{},socket={}", plugin.display(), socket.display()))
        };
        Self::start_with(kernel, mib, layers, processors, &table, argument, disks)
    }

    fn start_with(
        kernel: &str,
        mib: u64,
        layers: &str,
        processors: u32,
        tables: &str,
        plugin: impl FnOnce(&Daemon) -> Option<String>,
        disks: Vec<Disk>,
    ) -> Result<Option<Self>> {
        let assets = Assets::get()?;
        let Some(kernel) = assets.kernel(kernel)? else { return Ok(None) };
        let disk = Served::sparse("disk", mib).with("classify = true").with(&format!(
            "layers = [{{ kind = 'log', file = 'requests', lines_per_second_max = 0 }}{layers}]"
        ));
        let daemon = Daemon::serve_with(&[disk], tables)?;
        let mut guest = Guest::builder()
            .kernel(kernel)
            .root(Disk::snapshot_of(&assets.root))
            .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(processors));
        guest = disks.into_iter().fold(guest, fathom_tests::Builder::disk);
        if let Some(plugin) = plugin(&daemon) {
            guest = guest.argument("-plugin").argument(plugin);
        }
        let guest = guest.start()?;
        Ok(Some(Self { daemon, guest, problems: Vec::new() }))
    }

    /// Runs a script, whose output is shown only if it fails. In the script `$disk` is the disk.
    pub fn prepare(&self, script: &str) -> Result<()> {
        let script = format!(
            "export DM_DISABLE_UDEV=1 disk=/dev/vdb
            sh -e > /run/made 2>&1 << 'END' || {{ cat /run/made; exit 1; }}\n{script}\nEND\nsync"
        );
        self.guest.check(&script).map(drop)
    }

    /// Loads modules, and returns whether the guest has all these modules and programs. If not,
    /// prints that `name` is skipped.
    pub fn has(&self, name: &str, modules: &str, programs: &str) -> Result<bool> {
        let missing = self.guest.check(&format!(
            "for module in {modules}; do modprobe -q $module || echo \"the module $module\"; done
            for program in {programs}; do
                command -v $program > /dev/null || echo \"the program $program\"
            done"
        ))?;
        if !missing.is_empty() {
            let missing = missing.lines().collect::<Vec<_>>().join(", ");
            println!("Skipped: {name}: the guest does not have {missing}");
        }
        Ok(missing.is_empty())
    }

    /// Runs a script in the guest and returns its requests.
    pub fn requests(&self, script: &str) -> Result<Vec<Classified>> {
        let path = self.daemon.path("requests");
        let start = std::fs::metadata(&path)?.len();
        self.guest.check(script)?;
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Classified::parse_log(&String::from_utf8_lossy(&bytes))
    }

    /// Runs a script between two snapshots of the truth. Returns the comparison of its requests,
    /// and the second snapshot. `of` is the argument of [`Truth::of`].
    pub fn compare(
        &self,
        name: &str,
        script: &str,
        before: &Truth,
        of: &str,
    ) -> Result<(Comparison, Truth)> {
        let requests = self.requests(script)?;
        let after = Truth::of(&self.guest, of)?;
        let comparison = Comparison::of(&requests, before, &after, DIRECT);
        println!("{} {name}\n{comparison}", after.filesystem);
        Ok((comparison, after))
    }

    /// Notes a failure.
    pub fn note(&mut self, name: &str, found: Result<()>) {
        self.problems.extend(found.err().map(|error| format!("{name}: {error}")));
    }

    /// Fails if there was any failure. Ends the guest.
    pub fn end(self) -> Result<()> {
        if !self.problems.is_empty() {
            return Err(Error::new(self.problems.join("\n")));
        }
        self.guest.check_console()?;
        self.daemon.check("disk")?;
        self.guest.shutdown()
    }
}
