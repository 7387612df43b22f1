//! `[daemon]`: the settings of the daemon itself.

use std::net::SocketAddr;
use std::path::PathBuf;

use fathom_control::{Bytes, Nanoseconds, SOCKET_DEFAULT};
use fathom_devices::IdleOptions;
use fathom_frontend::nbd::BUDGET_MIN;
use fathom_options::{Check, Key, Section};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// The highest value of `metrics_cgroups_max`.
const CGROUPS_MAX: usize = 10_000;

/// The highest value of `idle_requests`.
const IDLE_REQUESTS_MAX: u64 = 1024;
/// The highest value of `idle_time`.
const IDLE_TIME_MAX: Nanoseconds = Nanoseconds(10_000_000_000);

/// The settings of the daemon itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DaemonOptions {
    /// The control socket.
    pub control: PathBuf,
    /// The group whose members may change everything, besides the daemon's user.
    pub control_group: Option<String>,
    /// The group whose members may look, and change nothing.
    pub view_group: Option<String>,
    /// The TCP address of `/metrics`, if there is one.
    #[serde(deserialize_with = "metrics_address")]
    pub metrics: Option<SocketAddr>,
    /// The most control groups of a disk with separate metrics.
    pub metrics_cgroups_max: usize,
    /// The log level.
    pub log: LogLevel,
    /// The most memory for the requests of all NBD clients.
    pub nbd_memory: Bytes,
    /// The most memory for the requests of one NBD connection.
    pub nbd_client_memory: Bytes,
    /// The most memory for the indexes of caches on stores, in percent of the host's.
    pub cache_index_percent: u64,
    /// The memory for the fingerprints of each pool of the block store.
    pub store_index_memory: Bytes,
    /// How long a shutdown waits for requests in flight.
    pub shutdown_time_max: Nanoseconds,
    /// A device is idle while fewer requests than this are in flight.
    pub idle_requests: u64,
    /// How long a device must have been idle before background work begins.
    pub idle_time: Nanoseconds,
    /// Whether something outlives the daemon that tells the next one of lost writes.
    pub keepsakes: Keepsakes,
}

impl DaemonOptions {
    /// The most memory for the indexes of caches on stores, in bytes.
    pub(crate) fn cache_index_memory(&self) -> u64 {
        let info = rustix::system::sysinfo();
        let memory = info.totalram.saturating_mul(info.mem_unit.into());
        (memory / 100).saturating_mul(self.cache_index_percent)
    }

    /// When a device counts as idle.
    pub(crate) fn idle(&self) -> IdleOptions {
        IdleOptions { threshold: self.idle_requests, dwell_ns: self.idle_time.0 }
    }
}

impl Default for DaemonOptions {
    fn default() -> Self {
        Self {
            control: SOCKET_DEFAULT.into(),
            control_group: None,
            view_group: None,
            metrics: None,
            metrics_cgroups_max: 100,
            log: LogLevel::Info,
            nbd_memory: Bytes(256 << 20),
            nbd_client_memory: Bytes(64 << 20),
            cache_index_percent: 10,
            store_index_memory: Bytes(40 << 20),
            shutdown_time_max: Nanoseconds(15_000_000_000),
            idle_requests: IdleOptions::default().threshold,
            idle_time: Nanoseconds(IdleOptions::default().dwell_ns),
            keepsakes: Keepsakes::On,
        }
    }
}

impl Section for DaemonOptions {
    const KEYS: &'static [Key] = &[
        Key::new(
            "control",
            "\"/run/fathom/control.sock\"",
            "the control socket, mode 0600. `--control` and the variable `FATHOM_CONTROL` take \
             precedence. The daemon creates `/run/fathom` if it is missing",
        ),
        Key::new(
            "control_group",
            "",
            "a group whose members may use the control socket, whose mode is then 0660. They can do \
             with all files what the daemon's user can. See [rights](operating.md#rights)",
        ),
        Key::new(
            "view_group",
            "",
            "a group whose members may look, and change nothing, by a second socket beside the \
             control socket: `/run/fathom/control.view.sock`, mode 0660. Commands find it by \
             themselves. See [rights](operating.md#rights)",
        ),
        Key::new(
            "metrics",
            "",
            "a TCP address for `/metrics`: `\"127.0.0.1:9560\"`, or only a port for the loopback. \
             Any client that can connect to it can read the metrics",
        ),
        Key::new(
            "metrics_cgroups_max",
            "100",
            "the most control groups of a disk's guest with their own metrics, up to 10,000",
        ),
        Key::new("log", "\"info\"", "`\"error\"`, `\"warning\"`, `\"info\"` or `\"debug\"`"),
        Key::new(
            "nbd_memory",
            "\"256M\"",
            "the most memory for the requests of all NBD clients, at least `\"64M\"`. One export \
             can use half of it. See [nbd.md](nbd.md#memory)",
        ),
        Key::new(
            "nbd_client_memory",
            "\"64M\"",
            "the most memory for the requests of one connection. A single request may always have \
             the greatest length of the protocol",
        ),
        Key::new(
            "cache_index_percent",
            "10",
            "the most memory for the indexes of all caches on stores, in percent of the host's, from 1 to 100. A disk \
             whose cache has no place is served without it. See [cache.md](cache.md#memory)",
        ),
        Key::new(
            "store_index_memory",
            "\"40M\"",
            "the memory for those fingerprints of each pool of the block store whose neighbours are \
             known too. With more of it, writes find more of the blocks that are there already. See \
             [store.md](store.md#equal-blocks-are-kept-once)",
        ),
        Key::new(
            "shutdown_time_max",
            "\"15s\"",
            "how long a shutdown waits for requests in flight. The daemon then ends without the \
             disks whose requests have not completed. The log names them, and the exit status is 1",
        ),
        Key::new(
            "idle_requests",
            "1",
            "a device is idle while fewer requests than this are in flight, up to 1024. See \
             [shared-disks.md](shared-disks.md#idle-time)",
        ),
        Key::new(
            "idle_time",
            "\"1ms\"",
            "how long a device must have been idle before background work begins, up to `\"10s\"`",
        ),
        Key::new(
            "keepsakes",
            "\"on\"",
            "whether a description of each file outlives a daemon that is killed, so that the next one sees that writes \
             were lost meanwhile: `\"on\"` or `\"off\"`. See [durability.md](durability.md#keepsakes)",
        ),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if self.metrics_cgroups_max > CGROUPS_MAX {
            check.problem(
                "metrics_cgroups_max",
                "`metrics_cgroups_max` of [daemon] is out of range",
                format!("choose a number from 0 to {CGROUPS_MAX}"),
            );
        }
        if !(1..=100).contains(&self.cache_index_percent) {
            check.problem(
                "cache_index_percent",
                "`cache_index_percent` of [daemon] is out of range",
                "choose a number from 1 to 100",
            );
        }
        if !(1..=IDLE_REQUESTS_MAX).contains(&self.idle_requests) {
            check.problem(
                "idle_requests",
                "`idle_requests` of [daemon] is out of range",
                format!("choose a number from 1 to {IDLE_REQUESTS_MAX}"),
            );
        }
        if self.idle_time.0 > IDLE_TIME_MAX.0 {
            check.problem(
                "idle_time",
                "`idle_time` of [daemon] is too long",
                format!("choose {IDLE_TIME_MAX} or less"),
            );
        }
        if self.nbd_memory.0 < BUDGET_MIN {
            check.problem(
                "nbd_memory",
                format!("{} are not enough for the longest NBD request", self.nbd_memory),
                format!("choose {} or more", Bytes(BUDGET_MIN)),
            );
        }
    }
}

/// Whether something outlives the daemon that tells the next one of lost writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keepsakes {
    /// The service manager, or a process `fathom keep`.
    #[default]
    On,
    /// Nothing.
    Off,
}

/// The level of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Also rejected requests and degraded service.
    Warning,
    /// Also normal events.
    #[default]
    Info,
    /// Also details for developers.
    Debug,
}

impl LogLevel {
    /// The name of the level.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

/// Reads an address for metrics: `127.0.0.1:9560`, `[::1]:9560`, or a port of the loopback
/// interface.
pub fn parse_metrics(text: &str) -> Option<SocketAddr> {
    if let Ok(port) = text.trim_start_matches(':').parse::<u16>() {
        return Some(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    text.replacen("localhost:", "127.0.0.1:", 1).parse().ok()
}

fn metrics_address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let text = String::deserialize(from)?;
    let address = parse_metrics(&text).ok_or_else(|| {
        let shown: String = text.chars().take(60).collect();
        D::Error::custom(format!(
            "{shown:?} is not an address for metrics: write it like `metrics = \"127.0.0.1:9560\"`, or \
             only the port for this host"
        ))
    })?;
    Ok(Some(address))
}
