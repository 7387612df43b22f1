//! What the host's kernel has swapped out of guests' memory, and what their pagers have taken away.

use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// What is swapped out of guests' memory, and the I/O that it makes needless.
pub const PAGER: Endpoint<Blocking, (), PagerQuery, (), PagerReport> = Endpoint::get(
    "/v1/pager",
    "the [memory of guests](#pager) that the host has swapped out, of all guests on vhost-user disks or of one, what their pagers have taken away, and the needless I/O of their disks with the layer `swap-watch`; only the guests with a pager, without a count of pages, with `pagers`",
);

/// Looks for the pagers of guests.
pub const RENEW_LEASES: Endpoint<Blocking, (), (), (), LeaseReport> = Endpoint::post(
    "/v1/pager/leases",
    "looks which guests on vhost-user disks have a [pager](#pager), and takes leases for it on the pages that are accessed; `fathom pager attach` calls it",
);

/// So many pages may exist when they are to come back: eight for each death of a pager since. More
/// means that another process has made them.
pub const EXISTING_PAGES_MAX: u64 = 64;

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&PAGER, &RENEW_LEASES];

/// Which accesses to guests' memory take leases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseReport {
    /// The connections of VMMs whose guests have a pager: all accesses to their memory take leases.
    pub leased: u64,
    /// Whether requests from before are still in flight. The leases count when they have
    /// completed.
    pub is_pending: bool,
    /// Why no page may leave the memory yet; empty if pages may.
    pub obstacle: String,
}

/// Whose memory is reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PagerQuery {
    /// Only the guest with this name, or with a disk of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// Only guests with a pager, and no count of pages, which takes time.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pagers: bool,
}

impl Query for PagerQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[("guest", "NAME"), ("pagers", "true")];
}

/// What is swapped out of guests' memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PagerReport {
    /// The time of the report, by the host's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// The time of the report, in nanoseconds since 1970.
    pub unix_time_ns: u64,
    /// The swap space of the host, in bytes.
    pub host_swap_bytes: u64,
    /// What is used of it, by anybody.
    pub host_swap_used_bytes: u64,
    /// The guests on vhost-user disks.
    pub guests: Vec<PagerGuest>,
}

/// The memory of a guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PagerGuest {
    /// Its virtual machine; may be empty.
    pub vm: String,
    /// Its disks that run, by name.
    pub disks: Vec<String>,
    /// The size of its memory, in bytes.
    pub memory_bytes: u64,
    /// What is in the host's memory; `None` if that is not known.
    pub resident_bytes: Option<u64>,
    /// What the host has swapped out; `None` if that is not known.
    pub swapped_bytes: Option<u64>,
    /// Why it is not known; empty if it is.
    pub unknown: String,
    /// When the pages were counted, by the host's monotonic clock, in nanoseconds.
    pub counted_ns: u64,
    /// How long the count took, in nanoseconds.
    pub count_ns: u64,
    /// The share of the guest's pages that are in the sample of the estimates, from 0 to 1.
    pub share: f64,
    /// Its disks with the layer `swap-watch`, by name.
    pub watched: Vec<PagerDisk>,
    /// Its pager; `None` if it never had one with a limit.
    pub pager: Option<GuestPager>,
}

/// What a guest's pager is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestPagerState {
    /// It serves, and pages may leave.
    Attached,
    /// It was asked to detach: all pages come in.
    Detaching,
    /// It has ended, and no page is away.
    Detached,
    /// It has ended, and pages are away: its guard serves.
    Orphaned,
    /// It has not reported for more than 30 s: it is dead, and its guard serves, or it hangs.
    Silent,
    /// A state of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

impl GuestPagerState {
    /// All states that this version knows.
    pub const ALL: [Self; 5] =
        [Self::Attached, Self::Detaching, Self::Detached, Self::Orphaned, Self::Silent];

    /// The name in JSON and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::Detaching => "detaching",
            Self::Detached => "detached",
            Self::Orphaned => "orphaned",
            Self::Silent => "silent",
            Self::Unknown => "unknown",
        }
    }
}

/// Why no page leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestPagerHold {
    /// Pages may leave.
    None,
    /// The pager is finding out who has the memory, for a moment.
    Looking,
    /// Somebody is not ready for pages that leave. Those that are away stay away.
    Obstacle,
    /// It is not safe that pages are away: all come in.
    Retreat,
    /// A reason of a newer version.
    #[default]
    #[serde(other)]
    Unknown,
}

/// What a guest's pager reports. Counts are those of the pager's life, which begins with its
/// attaching or adopting. The daemon passes on what the pager has stored, and checks nothing of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestPager {
    /// The VMM's process.
    pub process: u32,
    /// The pager's process.
    pub pager: u32,
    /// What it is doing.
    pub state: GuestPagerState,
    /// How long ago it has reported, in nanoseconds.
    pub age_ns: u64,
    /// Why no page leaves. `fathom pager list` has the reason as text.
    pub hold: GuestPagerHold,
    /// For how long that has been so, in nanoseconds.
    pub held_ns: u64,
    /// The most bytes of the guest's memory that are to be in the host's; 0 without a limit.
    pub limit_bytes: u64,
    /// The bytes that are.
    pub resident_bytes: u64,
    /// The bytes of the pages that are away.
    pub away_bytes: u64,
    /// The part of them that is kept as a number for each page.
    pub filled_bytes: u64,
    /// The bytes of the host's memory that the contents of the others take.
    pub store_bytes: u64,
    /// The bytes of a file on a disk that contents take; 0 for a pager without such a file.
    pub file_bytes: u64,
    /// Pages that have left.
    pub evicted_pages: u64,
    /// Pages that have come back.
    pub brought_pages: u64,
    /// Of these, pages that the daemon wanted.
    pub wanted_pages: u64,
    /// Pages that existed when they were to come back: at most eight after the death of a pager.
    pub existing_pages: u64,
    /// Pages whose content is damaged, so that they cannot come back.
    pub damaged_pages: u64,
    /// Pages that came back as zeroes, because a device was going to overwrite them.
    pub overwritten_pages: u64,
    /// Faults of missing pages.
    pub faults: u64,
    /// Of these, faults of pages that were away.
    pub away_faults: u64,
    /// The time of the faults of pages that were away, in nanoseconds.
    pub fault_sum_ns: u64,
    /// The 99th percentile of these times, in nanoseconds.
    pub fault_p99_ns: u64,
}

impl GuestPager {
    /// Whether it has ended in order: nothing is away, and its figures are of the past.
    pub fn has_detached(&self) -> bool {
        self.state == GuestPagerState::Detached
    }
}

/// The needless I/O of a disk since it has the layer `swap-watch`. All bytes are whole pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PagerDisk {
    /// The disk.
    pub disk: String,
    /// The requests whose pages were looked up, because pages of the guest were swapped out.
    pub examined_requests: u64,
    /// The reads into whole pages that were swapped out.
    pub stale_read_requests: u64,
    /// These pages, which came in only to be overwritten.
    pub stale_read_bytes: u64,
    /// The writes from pages that were swapped out.
    pub double_paging_requests: u64,
    /// These pages, which came in only to be written to the disk.
    pub double_paging_bytes: u64,
    /// The pages with the content of a block of the disk that were swapped out.
    pub swapped_out: PageEstimate,
    /// Those that came back with the content of the block: they were written to swap for nothing.
    pub silent_writes: PageEstimate,
    /// Those that came back with another content.
    pub changed: PageEstimate,
    /// The blocks that were read again while the page that had them was swapped out.
    pub rereads: PageEstimate,
}

/// A number that is estimated from a sample of the guest's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PageEstimate {
    /// The pages of the sample. The standard error of the estimate is the bytes divided by the
    /// root of this number.
    pub sampled_pages: u64,
    /// The bytes for which they stand.
    pub bytes: u64,
}

impl Client {
    /// Has the daemon look which guests have a pager.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn renew_leases(&self) -> Result<LeaseReport, ClientError> {
        self.ask(&RENEW_LEASES, &(), &(), &())
    }

    /// What is swapped out of the memory of all guests, or of the guest with this name or disk.
    ///
    /// # Errors
    /// When there is no answer, or no such guest.
    pub fn pager(&self, guest: Option<&str>) -> Result<PagerReport, ClientError> {
        let query = PagerQuery { guest: guest.map(str::to_owned), pagers: false };
        self.ask(&PAGER, &(), &query, &())
    }

    /// What the pagers of all guests report. No page is counted.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn guest_pagers(&self) -> Result<PagerReport, ClientError> {
        self.ask(&PAGER, &(), &PagerQuery { guest: None, pagers: true }, &())
    }
}
