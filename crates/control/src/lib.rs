//! The control interface of the Fathom daemon: its vocabulary, and a small blocking client.
//!
//! The daemon speaks HTTP/1.1 with JSON bodies on a Unix socket (mode 0600). Every path but
//! `/metrics` begins with the version, `/v1`. Within a version, fields are only added, and readers
//! ignore unknown fields. The body of an error is an [`ErrorReply`].
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /v1/daemon` | | [`DaemonInfo`] |
//! | `GET /v1/disks` | | [`DiskList`] |
//! | `GET /v1/disks/{name}` | | [`DiskStatus`] |
//! | `POST /v1/disks` | [`DiskDefinition`] | [`DiskStatus`] |
//! | `PATCH /v1/disks/{name}` | [`DiskChange`] | [`DiskStatus`] |
//! | `POST /v1/disks/{name}/retry` | | [`DiskStatus`] |
//! | `POST /v1/disks/{name}/log` | [`LogRequest`] | [`LogAnswer`] |
//! | `DELETE /v1/disks/{name}` | | [`Done`] |
//! | `GET /v1/statistics` | | [`Statistics`] |
//! | `GET /v1/devices` | | [`DeviceList`] |
//! | `GET /v1/background` | | [`BackgroundList`] |
//! | `GET /v1/caches?disk=NAME&points=N&files=N` | | [`CacheReport`] |
//! | `GET /v1/offload?disk=NAME` | | [`OffloadReport`] |
//! | `GET /v1/disks/{name}/offload` | | [`OffloadHistory`] |
//! | `POST /v1/disks/{name}/offload` | [`OffloadRequest`] | [`OffloadAnswer`] |
//! | `DELETE /v1/clusters/{cluster}/volumes/{volume}` | | [`Done`] |
//! | `GET /v1/usage?disk=NAME&vm=NAME` | | [`UsageReport`] |
//! | `GET /v1/slow?disk=NAME&count=N` | | [`SlowReport`] |
//! | `GET /v1/guests` | | [`GuestList`] |
//! | `GET /v1/dirty?guest=NAME&files=N&mapped=true&tables=STRIDE` | | [`DirtyReport`] |
//! | `GET /v1/queries` | | [`QueryList`] |
//! | `GET /v1/events?after=N&wait_ms=T` | | [`EventList`] |
//! | `GET /v1/recording?disk=NAME&pulse_ms=T` | | a recording: events as they occur |
//! | `GET /v1/monitor` | | [`MonitorStatus`] |
//! | `POST /v1/reload` | | [`ReloadReport`] |
//! | `GET /v1/configuration` | | [`ConfigurationReport`] |
//! | `POST /v1/configuration/revert` | [`RevertRequest`] | [`ReloadReport`] |
//! | `POST /v1/shutdown` | | [`Done`] |
//! | `GET /metrics` | | Prometheus text |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod background;
mod cache;
mod client;
mod configuration;
mod connect;
mod daemon;
mod definition;
mod device;
mod dirty;
mod disk;
mod error;
mod flush;
mod http;
mod insight;
mod log;
mod monitor;
mod offload;
mod problem;
mod query;
mod statistics;
mod stream;
mod usage;

pub use background::{BackgroundDevice, BackgroundList, WaitingWork};
pub use cache::{
    CacheClass, CacheCounts, CacheCurve, CacheDisk, CacheEstimate, CacheFile, CacheGroup,
    CacheInfo, CacheRefusals, CacheRemovals, CacheReport, ESTIMATES,
};
pub use client::{Client, ClientError};
pub use configuration::{
    ConfigurationReport, Deviation, DeviationKind, KeyDeviation, RevertRequest, SetAside,
};
pub use connect::connect;
pub use daemon::{
    DaemonEvent, DaemonInfo, DaemonState, Done, EventLevel, EventList, ListenerStatus, ReloadReport,
};
pub use definition::{
    BackendDefinition, DiskChange, DiskDefinition, ExportsDefinition, ImageFormat,
    ImageFormatError, LayerDefinition, ListenerDefinition, ModelDefinition, ModelKind,
    TlsDefinition, VhostUserDefinition, WhenFull,
};
pub use device::{DeviceActivity, DeviceIdle, DeviceList, DeviceStatus};
pub use dirty::{
    DeviceDirty, DirtyReport, DirtyRequest, FileDirty, FilesDirty, GuestDirty, MappedDirty,
    TablesDirty, WrittenDirty,
};
pub use disk::{
    BackendStatus, CapabilitiesStatus, DiskList, DiskStatus, FrontendStatus, GeometryStatus,
    LayerFigure, LayerFigures, LayerStatus, NbdStatus, UnservedDisk, VhostUserStatus,
};
pub use error::{ErrorBody, ErrorCode, ErrorReply};
pub use fathom_histogram::Histogram;
pub use fathom_options::{Bytes, Nanoseconds, UnitError, count, parse_bytes, parse_nanoseconds};
pub use flush::{FlushReport, FlushRequest, FlushWay};
pub use http::escape;
pub use insight::{
    DiskSlow, FactsStatus, GuestCounters, GuestInfo, GuestList, InsightState, InsightStatus,
    PartStatus, SlowReport, SlowRequest,
};
pub use log::{LogAnswer, LogDecision, LogRequest};
pub use monitor::MonitorStatus;
pub use offload::{
    OffloadAction, OffloadAnswer, OffloadDisk, OffloadForecast, OffloadHistory, OffloadReport,
    OffloadRequest, OffloadSample, OffloadState,
};
pub use problem::{Problem, ProblemKind};
pub use query::{QueryList, QueryState, QueryStatus, ResultKind};
pub use statistics::{DiskStatistics, OperationStatistics, SizeStatistics, Statistics};
pub use stream::AnswerStream;
pub use usage::{DiskUsage, UsageCount, UsageCounts, UsageReport, UsageRow};

/// The version of the interface, and the first part of its paths.
pub const VERSION: u32 = 1;

/// The environment variable that names the control socket if no flag does, for the daemon and for
/// its clients.
pub const SOCKET_VARIABLE: &str = "FATHOM_CONTROL";

/// The path of the daemon's control socket, unless the configuration sets another.
pub const SOCKET_DEFAULT: &str = "/run/fathom/control.sock";
