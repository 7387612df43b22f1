//! `fathom serve`: its flags, and the configuration that they describe.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use fathom_control::{
    Bytes, DiskDefinition, ExportsDefinition, ImageFormat, LayerDefinition, ListenerDefinition,
    ModelDefinition, ModelKind, Nanoseconds, SOCKET_VARIABLE, TlsDefinition, VhostUserDefinition,
    WhenFull,
};
use serde_json::json;

use crate::configuration::{
    Configuration, ConfigurationFile, LogLevel, Origin, Origins, Placed, Problems, layers,
    parse_metrics,
};
use crate::process::run::run;

const CONTROL_HELP: &str = "The control socket [default: $FATHOM_CONTROL, or the socket of the \
                            configuration file, or /run/fathom/control.sock]";

/// The exit status for a wrong configuration.
const WRONG: u8 = 2;

/// Serve disks: those of a configuration file, or one that flags describe
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = "\
Examples:
  fathom serve --image disk.img --socket /run/fathom/disk.sock
  fathom serve --memory 1G --nbd unix:/tmp/nbd.sock --control /tmp/control.sock
  fathom serve --config /etc/fathom/fathom.toml
  fathom serve --config fathom.toml --check

A disk of a file that cannot be served keeps no other from it: it is a problem that `fathom disk list`
shows with its remedy, and is tried again until it is served.

Signals: SIGTERM and SIGINT complete requests in flight, flush and end (a second one ends
immediately); SIGHUP reads the configuration again.

Exit status: 0 after a clean shutdown, 1 on failure, 2 if the configuration is wrong.")]
pub struct Serve {
    /// The configuration file
    #[arg(long, short, value_name = "FILE", conflicts_with = "disk")]
    config: Option<PathBuf>,

    /// Only check the configuration and report its errors, with the images that it names
    #[arg(long)]
    check: bool,

    /// End if any disk or listener cannot be served [default with flags for one disk]
    #[arg(long, conflicts_with = "check")]
    strict: bool,

    #[arg(long, value_name = "SOCKET", help = CONTROL_HELP)]
    control: Option<PathBuf>,

    /// Serve /metrics over TCP, for example at 127.0.0.1:9560
    #[arg(long, value_name = "ADDRESS", value_parser = metrics_address)]
    metrics: Option<SocketAddr>,

    /// The log level [default: info]
    #[arg(long, value_name = "LEVEL")]
    log: Option<LogLevel>,

    #[command(flatten)]
    flags: Flags,
}

/// One disk, described by flags.
#[derive(Args, Clone, Debug, Default)]
#[group(id = "disk", multiple = true)]
#[command(next_help_heading = "One disk")]
struct Flags {
    /// An image or block device
    #[arg(long, value_name = "FILE", conflicts_with_all = ["memory", "null"])]
    image: Option<PathBuf>,

    /// The format: raw, also of bytes that look like another one, or qcow2, vmdk, vhdx, vdi
    #[arg(long, value_name = "FORMAT", requires = "image")]
    format: Option<ImageFormat>,

    /// A disk in memory of this size, for example 1G
    #[arg(long, value_name = "SIZE", conflicts_with = "null")]
    memory: Option<Bytes>,

    /// A disk of this size that discards writes, for measurements
    #[arg(long, value_name = "SIZE")]
    null: Option<Bytes>,

    /// The disk's name [default: the image's name without its extension, or `disk`]
    #[arg(long)]
    name: Option<String>,

    /// The virtual machine that the disk belongs to
    #[arg(long)]
    vm: Option<String>,

    /// The serial that guests see [default: the name]
    #[arg(long)]
    serial: Option<String>,

    /// Serve a guest on this vhost-user socket
    #[arg(long, value_name = "SOCKET")]
    socket: Option<PathBuf>,

    /// The most queues that the guest can use [default: 4]
    #[arg(long, value_name = "NUMBER", requires = "socket")]
    queues: Option<u16>,

    /// The number of threads that serve the queues [default: one for each processor]
    #[arg(long, value_name = "NUMBER", requires = "socket")]
    threads: Option<u16>,

    /// The longest to watch a ring before its thread sleeps, for example 32us; 0 never watches
    #[arg(long, value_name = "TIME", requires = "socket")]
    spin: Option<Nanoseconds>,

    /// A group whose members may also connect to the disk's Unix sockets
    #[arg(long, value_name = "NAME")]
    group: Option<String>,

    /// Serve NBD clients at `unix:PATH` or `HOST:PORT`
    #[arg(long, value_name = "ADDRESS")]
    nbd: Option<String>,

    /// Serve NBD clients over TCP without TLS
    #[arg(long, requires = "nbd")]
    plain: bool,

    /// The certificate chain for NBD over TLS (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["nbd", "tls_key"])]
    tls_certificate: Option<PathBuf>,

    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,

    /// Accept only NBD clients with certificates signed by this authority (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_client_ca: Option<PathBuf>,

    /// Keys for NBD over TLS without certificates, as lines of user:key
    #[arg(long, value_name = "FILE", requires = "nbd", conflicts_with = "tls_certificate")]
    tls_psk: Option<PathBuf>,

    /// A name for a block device that has no lasting one of its own
    #[arg(long, value_name = "NAME", requires = "image")]
    key: Option<String>,

    /// Bypass the host's page cache
    #[arg(long)]
    direct: bool,

    /// Refuse writes
    #[arg(long)]
    read_only: bool,

    /// Make writes wait while the image's file system is full, instead of failing
    #[arg(long, requires = "image")]
    wait_when_full: bool,

    /// The logical block size that guests see: 512 or 4K
    #[arg(long, value_name = "SIZE")]
    block_size: Option<Bytes>,

    /// Do not count and measure requests
    #[arg(long)]
    no_tap: bool,

    /// Do not find out what the guest's requests mean
    #[arg(long)]
    no_classify: bool,

    /// Delay every request, for example by 5ms
    #[arg(long, value_name = "TIME")]
    delay: Option<Nanoseconds>,

    /// Add a layer, for example fault,rate=0.01,operations=[read,write]; the uppermost first
    #[arg(long = "layer", value_name = "KIND[,KEY=VALUE…]", value_parser = LayerDefinition::from_flag)]
    layers: Vec<LayerDefinition>,

    /// Imitate the timing of another disk
    #[arg(long, value_name = "KIND")]
    model: Option<Model>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Model {
    Hdd,
    Ssd,
    SataSsd,
}

fn metrics_address(text: &str) -> Result<SocketAddr, String> {
    parse_metrics(text).ok_or_else(|| "write it like 127.0.0.1:9560, or only the port".to_owned())
}

/// Runs `fathom serve`. `begun` is the start time of the process, from which the time until the
/// daemon is ready is measured.
pub fn serve(options: &Serve, begun: Instant) -> ExitCode {
    let file = options.config.as_ref().map(|path| ConfigurationFile {
        path: path.clone(),
        control: options.control(),
        metrics: options.metrics,
        log: options.log,
    });
    // Who names one disk by flags sees at once why it cannot be served.
    let is_strict = options.strict || file.is_none();
    let configuration = match &file {
        Some(file) if options.strict || options.check => file.load_strictly(),
        Some(file) => file.load(),
        None => options.configuration(),
    };
    match configuration {
        Ok(configuration) if options.check => {
            if let Err(problems) = configuration.check_formats() {
                eprintln!("{problems}");
                return ExitCode::from(WRONG);
            }
            for warning in configuration.warnings().0 {
                eprintln!("{}warning: {}\n  → {}", warning.origin, warning.message, warning.remedy);
            }
            println!(
                "sound: {}, {}",
                fathom_control::count(configuration.disks.len(), "disk"),
                fathom_control::count(configuration.listeners.len(), "NBD listener")
            );
            ExitCode::SUCCESS
        }
        Ok(configuration) => run(&configuration, file, is_strict, begun),
        Err(problems) => {
            eprintln!("{problems}");
            ExitCode::from(WRONG)
        }
    }
}

impl Serve {
    /// The control socket of the flag or of the environment variable, which all Fathom commands use
    /// to find the daemon.
    fn control(&self) -> Option<PathBuf> {
        let named = || std::env::var_os(SOCKET_VARIABLE).filter(|path| !path.is_empty());
        let path = self.control.clone().or_else(|| named().map(PathBuf::from))?;
        Some(absolute(&path))
    }

    /// The configuration that the flags describe.
    fn configuration(&self) -> Result<Configuration, Problems> {
        let flags = &self.flags;
        if flags.image.is_none() && flags.memory.is_none() && flags.null.is_none() {
            let mut problems = Problems::default();
            problems.add(
                Origin::Request,
                "there is nothing to serve",
                "add --config FILE, or a disk: --image FILE, --memory SIZE or --null SIZE; \
                 `fathom serve --help` has examples",
            );
            return Err(problems);
        }
        if flags.socket.is_none() && flags.nbd.is_none() {
            let mut problems = Problems::default();
            problems.add(
                Origin::Request,
                "no client could reach the disk",
                "add --socket SOCKET for a guest, or --nbd ADDRESS for NBD clients",
            );
            return Err(problems);
        }
        let mut configuration = Configuration::default();
        let Placed { definition: daemon, origins: written } = &mut configuration.daemon;
        if let Some(control) = self.control() {
            daemon.control = control;
        }
        daemon.metrics = self.metrics;
        daemon.log = self.log.unwrap_or_default();
        *written = origins(&[("control", "--control")]);
        let mut definition = flags.disk();
        let origins_of_disk = origins(&[
            ("name", "--name"),
            ("vm", "--vm"),
            ("serial", "--serial"),
            ("image", "--image"),
            ("format", "--format"),
            ("key", "--key"),
            ("memory", "--memory"),
            ("null", "--null"),
            ("direct", "--direct"),
            ("block_size", "--block-size"),
            ("layers", "--layer"),
            ("vhost_user.socket", "--socket"),
            ("vhost_user.queues", "--queues"),
            ("vhost_user.threads", "--threads"),
            ("vhost_user.spin", "--spin"),
            ("vhost_user.group", "--group"),
        ]);
        let (folder, mut problems) = (std::env::current_dir().ok(), Problems::default());
        let layers = &mut definition.layers;
        layers::complete(layers, &origins_of_disk, folder.as_deref(), &mut problems);
        problems.none_or()?;
        configuration.disks.push(Placed { definition, origins: origins_of_disk });
        if let Some(address) = &flags.nbd {
            configuration.listeners.push(Placed {
                definition: flags.listener(address),
                origins: origins(&[
                    ("address", "--nbd"),
                    ("group", "--group"),
                    ("tls.certificate", "--tls-certificate"),
                    ("tls.key", "--tls-key"),
                    ("tls.client_ca", "--tls-client-ca"),
                    ("tls.psk", "--tls-psk"),
                ]),
            });
        }
        configuration.check()?;
        configuration.check_formats()?;
        Ok(configuration)
    }
}

/// Makes a path of the command line absolute, relative to the shell's folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn origins(flags: &[(&str, &'static str)]) -> Origins {
    let mut origins = Origins::new(Origin::Flag("fathom serve"));
    for (key, flag) in flags {
        origins.note(key, Origin::Flag(flag));
    }
    origins
}

impl Flags {
    fn disk(&self) -> DiskDefinition {
        let stem = self.image.as_deref().and_then(Path::file_stem);
        let name = self.name.clone().or_else(|| Some(stem?.to_str()?.to_owned()));
        let delay = |time: Nanoseconds| LayerDefinition::new("delay", json!({ "time": time }));
        let layers = self.delay.map(delay).into_iter().chain(self.layers.iter().cloned());
        DiskDefinition {
            name: name.unwrap_or_else(|| "disk".into()),
            vm: self.vm.clone().unwrap_or_default(),
            serial: self.serial.clone().unwrap_or_default(),
            image: self.image.as_deref().map(absolute),
            format: self.format,
            backing_folders: Vec::new(),
            key: self.key.clone(),
            store: None,
            volume: None,
            nbd: None,
            timeout: None,
            memory: self.memory,
            null: self.null,
            direct: self.direct,
            read_only: self.read_only,
            when_full: if self.wait_when_full { WhenFull::Wait } else { WhenFull::Fail },
            block_size: self.block_size,
            tap: !self.no_tap,
            classify: !self.no_classify,
            class_bounds: None,
            layers: layers.collect(),
            model: self.model.map(|model| ModelDefinition {
                kind: match model {
                    Model::Hdd => ModelKind::Hdd,
                    Model::Ssd => ModelKind::Ssd,
                    Model::SataSsd => ModelKind::SataSsd,
                },
                ..ModelDefinition::default()
            }),
            vhost_user: self.socket.as_ref().map(|socket| {
                let default = VhostUserDefinition::default();
                VhostUserDefinition {
                    socket: absolute(socket),
                    queues: self.queues.unwrap_or(default.queues),
                    threads: self.threads,
                    spin: self.spin,
                    group: self.group.clone(),
                }
            }),
        }
    }

    fn listener(&self, address: &str) -> ListenerDefinition {
        let tls =
            (self.tls_certificate.is_some() || self.tls_psk.is_some()).then(|| TlsDefinition {
                certificate: self.tls_certificate.clone(),
                key: self.tls_key.clone(),
                client_ca: self.tls_client_ca.clone(),
                psk: self.tls_psk.clone(),
            });
        let address = match address.strip_prefix("unix:") {
            Some(path) => format!("unix:{}", absolute(Path::new(path)).display()),
            None => address.to_owned(),
        };
        ListenerDefinition {
            address,
            exports: ExportsDefinition::All,
            tls,
            plain_allowed: self.plain,
            group: self.group.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        serve: Serve,
    }

    fn configuration(layers: &[&str]) -> Result<Vec<LayerDefinition>, String> {
        let flags = ["serve", "--memory=1M", "--nbd=unix:/tmp/nbd.sock", "--control=/tmp/c.sock"];
        let layers = layers.iter().flat_map(|layer| ["--layer", layer]);
        let command = Command::try_parse_from(flags.into_iter().chain(layers));
        let command = command.map_err(|error| error.to_string())?;
        let configuration = command.serve.configuration().map_err(|error| error.to_string())?;
        Ok(configuration.disks[0].definition.layers.clone())
    }

    #[test]
    fn layers_are_read_from_flags() {
        let layers = ["fault,rate=0.5,operations=[read,write],seed=7,length=4K", "tap"];
        let layers = serde_json::to_value(configuration(&layers).unwrap()).unwrap();
        let expected = json!([
            { "kind": "fault", "effect": "refused", "rate": 0.5, "operations": ["read", "write"],
              "offset": 0, "length": 4096, "after": 0, "seed": 7 },
            { "kind": "tap" },
        ]);
        assert_eq!(layers, expected);
        let wrong = configuration(&["delay,tiem=5ms", "dealy"]).unwrap_err();
        assert_eq!(
            wrong,
            "--layer: there is no key `tiem` in the layer `delay`\n  → did you mean `time`?\n\
             --layer: there is no kind of layer \"dealy\"\n  → did you mean `delay`?"
        );
        let wrong = configuration(&["delay,time"]).unwrap_err();
        assert!(wrong.contains("\"time\" is not of the form KEY=VALUE"), "{wrong}");
        let wrong = configuration(&["delay,time=1s,time=2s"]).unwrap_err();
        assert!(wrong.contains("`time` is given twice"), "{wrong}");
        let wrong = configuration(&["fault,rate=2"]).unwrap_err();
        assert!(wrong.starts_with("--layer: a rate of 2 is not between 0 and 1"), "{wrong}");
    }
}
