//! The control interface of the Fathom daemon: its vocabulary, and a small blocking client.
//!
//! Read [`ENDPOINTS`] first. The crate must not know how the daemon comes to an
//! answer.
//!
//! The daemon speaks HTTP/1.1 with JSON bodies on a Unix socket (mode 0600). Every path but
//! `/metrics` begins with the version, `/v1`. Within a version, fields are only added, and readers
//! ignore unknown fields. The body of an error is an [`ErrorReply`].
//!
//! Each request is a value of the type [`Endpoint`], which has the types of its parameters, of its
//! body and of its answer, and says what the answer costs the daemon. A feature's file has its
//! endpoints ([`endpoints`]), its types and its methods of [`Client`].

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod audit;
mod background;
mod cache;
mod client;
mod configuration;
mod connect;
mod daemon;
mod definition;
mod device;
mod difference;
mod dirty;
mod disk;
mod endpoint;
mod error;
mod flush;
mod http;
mod insight;
mod lifetimes;
mod log;
mod monitor;
mod moving;
mod offload;
mod pager;
mod patterns;
mod pool;
mod problem;
mod processes;
mod query;
mod reclaim;
mod scrub;
mod statistics;
mod stream;
mod usage;
mod written;

pub use audit::{AUDIT_ENTRIES_MAX, AuditEntry, AuditQuery, AuditReport};
pub use background::{BackgroundDevice, BackgroundList, WaitingWork};
pub use cache::{
    CacheClass, CacheCounts, CacheCurve, CacheDisk, CacheEstimate, CacheFile, CacheGroup,
    CacheInfo, CacheQuery, CacheRefusals, CacheRemovals, CacheReport, ESTIMATES,
};
pub use client::{Client, ClientError};
pub use configuration::{
    ConfigurationReport, Deviation, DeviationKind, KeyDeviation, RevertRequest, SetAside,
};
pub use connect::{connect, view_socket};
pub use daemon::{
    DaemonEvent, DaemonInfo, DaemonState, Done, EventLevel, EventList, EventQuery, ListenerStatus,
    MetricsPage, ReloadQuery, ReloadReport,
};
pub use definition::{
    DiskChange, DiskDefinition, ExportsDefinition, ImageFormat, ImageFormatError, LayerDefinition,
    ListenerDefinition, ModelDefinition, ModelKind, TlsDefinition, VhostUserDefinition, WhenFull,
};
pub use device::{DeviceActivity, DeviceIdle, DeviceList, DeviceStatus};
pub use difference::{
    DifferenceExtent, DifferencePart, DifferenceQuery, SnapshotStream, SnapshotStreamQuery,
};
pub use dirty::{
    DeviceDirty, DirtyQuery, DirtyReport, DirtyRequest, FileDirty, FilesDirty, GuestDirty,
    MappedDirty, TablesDirty, WrittenDirty,
};
pub use disk::{
    AddQuery, BackendStatus, CapabilitiesStatus, ChainFile, DiskList, DiskStatus, FrontendStatus,
    GeometryStatus, LayerFigure, LayerFigures, LayerStatus, NbdStatus, RemoveQuery, StoreStatus,
    UnservedDisk, VhostUserStatus,
};
pub use endpoint::{
    AnyEndpoint, AtOnce, Blocking, Change, Cost, CostKind, ENDPOINTS, Endpoint, EndpointRow,
    Method, PathParameters, Query, QueryError, Waiting, has_body, read_query,
};
pub use error::{ErrorBody, ErrorCode, ErrorReply};
pub use fathom_histogram::Histogram;
pub use fathom_options::{Bytes, Nanoseconds, UnitError, count, parse_bytes, parse_nanoseconds};
pub use flush::{FlushReport, FlushRequest, FlushWay};
pub use http::escape;
pub use insight::{
    DiskSlow, FactsStatus, GuestCounters, GuestInfo, GuestList, HookInfo, HookKind, InsightState,
    InsightStatus, PartStatus, SlowQuery, SlowReport, SlowRequest,
};
pub use lifetimes::{DiskLifetimes, GroupedBy, LifetimesGroup, LifetimesQuery, LifetimesReport};
pub use log::{LogAnswer, LogDecision, LogRequest};
pub use monitor::MonitorStatus;
pub use moving::{MovePhase, MoveRequest, MoveStatus};
pub use offload::{
    OffloadAction, OffloadAnswer, OffloadDisk, OffloadForecast, OffloadHistory, OffloadQuery,
    OffloadReport, OffloadRequest, OffloadSample, OffloadState,
};
pub use pager::{
    EXISTING_PAGES_MAX, GuestPager, GuestPagerHold, GuestPagerState, LeaseReport, PageEstimate,
    PagerDisk, PagerGuest, PagerQuery, PagerReport,
};
pub use patterns::{
    CopiedFile, DiskPatterns, EncryptedFile, EncryptionState, PatternFile, PatternProcess,
    PatternsQuery, PatternsReport,
};
pub use pool::{
    CHECK_PAUSE, Freeze, PoolChange, PoolEntry, PoolRequest, PoolsReport, RULE_PREFIX,
    SnapshotEntry, VolumeEntry,
};
pub use problem::{Problem, ProblemKind};
pub use processes::{
    CallFile, CallInfo, GuestProcesses, ProcessInfo, ProcessesQuery, ProcessesReport,
};
pub use query::{QueryList, QueryState, QueryStatus, ResultKind};
pub use reclaim::{DeletionEntry, ReclaimEntry, TogetherEntry};
pub use scrub::{DamageOf, DamagedPart, ScrubEntry, ScrubPhase};
pub use statistics::{DiskStatistics, OperationStatistics, SizeStatistics, Statistics};
pub use stream::{AnswerStream, Recording, RecordingQuery};
pub use usage::{DiskUsage, UsageCount, UsageCounts, UsageQuery, UsageReport, UsageRow};
pub use written::{WrittenFile, WrittenFiles, WrittenFilesQuery};

/// The endpoints, by name.
pub mod endpoints {
    pub use crate::audit::AUDIT;
    pub use crate::background::BACKGROUND;
    pub use crate::cache::CACHES;
    pub use crate::configuration::{CONFIGURATION, REVERT};
    pub use crate::daemon::{DAEMON, EVENTS, METRICS, RELOAD, SHUTDOWN};
    pub use crate::device::DEVICES;
    pub use crate::difference::{DIFFERENCE, SNAPSHOT_STREAM};
    pub use crate::dirty::DIRTY;
    pub use crate::disk::{
        ADD_DISK, CHANGE_DISK, DISK_LIST, DISK_STATUS, RECOVER_DISK, REMOVE_DISK, RETRY_DISK,
    };
    pub use crate::flush::FLUSH_GUEST;
    pub use crate::insight::{GUESTS, SLOW};
    pub use crate::lifetimes::LIFETIMES;
    pub use crate::log::DECIDE_LOG;
    pub use crate::monitor::MONITOR;
    pub use crate::moving::{CANCEL_MOVE, MOVE_DISK};
    pub use crate::offload::{CHANGE_OFFLOAD, FORGET_VOLUME, OFFLOAD, OFFLOAD_HISTORY};
    pub use crate::pager::{PAGER, RENEW_LEASES};
    pub use crate::patterns::PATTERNS;
    pub use crate::pool::{CHANGE_POOL, POOLS};
    pub use crate::processes::PROCESSES;
    pub use crate::query::QUERIES;
    pub use crate::statistics::STATISTICS;
    pub use crate::stream::RECORDING;
    pub use crate::usage::USAGE;
    pub use crate::written::WRITTEN_FILES;
}

/// The version of the interface, and the first part of its paths.
pub const VERSION: u32 = 1;

/// The environment variable that names the control socket if no flag does, for the daemon and for
/// its clients.
pub const SOCKET_VARIABLE: &str = "FATHOM_CONTROL";

/// The path of the daemon's control socket, unless the configuration sets another.
pub const SOCKET_DEFAULT: &str = "/run/fathom/control.sock";
