//! The control interface of the Fathom daemon: its vocabulary, and a small blocking client.
//!
//! The daemon speaks HTTP/1.1 with JSON bodies on a Unix socket (mode 0600). Every path but
//! `/metrics` begins with the version, `/v1`. Within a version, fields are only added, and readers
//! ignore unknown fields. The body of an error is an [`ErrorReply`].
//!
//! `docs/control.md` lists the paths, with what each of them takes and answers, and [`Client`] asks
//! for them. Begin reading at [`DiskDefinition`] and [`DiskStatus`].

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
