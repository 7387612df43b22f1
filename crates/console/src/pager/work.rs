//! What a pager does beside serving faults: the options of `fathom pager attach` and `adopt`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use fathom_attach::{
    EvictionOptions, LEASE_FOLDER, Pager, STORE_FOLDER, ShadowOptions, SwapOptions,
};
use fathom_control::Bytes;

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};

/// The least memory for copies, in bytes.
const SHADOW_BYTES_MIN: u64 = 1 << 20;
/// The least limit, in bytes.
pub(super) const LIMIT_BYTES_MIN: u64 = 16 << 20;
/// The smallest swap file, and the least memory for contents with one, in bytes.
const SWAP_BYTES_MIN: u64 = 1 << 20;
/// The memory for contents with a swap file, if there is no limit yet; else a quarter of the limit.
const PAGES_BYTES: u64 = 64 << 20;
/// How long a daemon may take for its answer, and how long that may be, in bytes.
const ASK_TIME_MAX: Duration = Duration::from_secs(10);
const ASK_BYTES_MAX: u64 = 64 << 10;

/// What a pager does beside serving faults.
#[derive(Debug, Args)]
pub(super) struct WorkArguments {
    /// Have at most so many bytes of the guest's memory in the host's memory
    #[arg(long, value_name = "SIZE", conflicts_with = "shadow")]
    limit: Option<Bytes>,
    /// The folder of the pages that have left: in memory, for this user alone
    #[arg(long, value_name = "FOLDER", default_value = STORE_FOLDER)]
    pages: PathBuf,
    /// Move what takes too much memory there to a file in this folder: on a disk, for this user
    /// alone
    #[arg(long, value_name = "FOLDER", conflicts_with = "shadow")]
    swap: Option<PathBuf>,
    /// How much memory that is; a quarter of the limit without this option
    #[arg(long, value_name = "SIZE", requires = "swap")]
    pages_limit: Option<Bytes>,
    /// The most bytes of the file; as many as the guest's memory has without this option
    #[arg(long, value_name = "SIZE", requires = "swap")]
    swap_limit: Option<Bytes>,
    /// Copy pages that could leave, at most so many bytes, and compare them later
    #[arg(long, value_name = "SIZE")]
    shadow: Option<Bytes>,
    #[command(flatten)]
    control: ControlOptions,
}

impl WorkArguments {
    /// Whether the sizes can be used.
    pub fn check(&self) -> CommandResult {
        let sizes = [
            (self.shadow, SHADOW_BYTES_MIN, "--shadow"),
            (self.limit, LIMIT_BYTES_MIN, "--limit"),
            (self.pages_limit, SWAP_BYTES_MIN, "--pages-limit"),
            (self.swap_limit, SWAP_BYTES_MIN, "--swap-limit"),
        ];
        sizes.into_iter().try_for_each(|(size, least, option)| match size {
            Some(Bytes(bytes)) => at_least(bytes, least, option),
            None => Ok(()),
        })
    }

    fn swap(&self) -> Option<SwapOptions> {
        let bytes = |size: Option<Bytes>| size.map(|Bytes(bytes)| bytes);
        let of_limit = bytes(self.limit).map_or(PAGES_BYTES, |limit| limit / 4);
        Some(SwapOptions {
            folder: absolute(self.swap.as_ref()?),
            bytes_max: bytes(self.swap_limit),
            memory_max: bytes(self.pages_limit).unwrap_or(of_limit),
        })
    }

    /// Has a pager begin with what was asked for.
    pub fn start(&self, pager: &mut Pager) -> CommandResult {
        let control = self.control.clone();
        let ask = Arc::new(move || {
            // A daemon that does not answer maps no memory, or the pager finds out. It may be that
            // of another user: what it says is not trusted.
            let client = control.client().with_limit(ASK_TIME_MAX).bounded(ASK_BYTES_MAX);
            let _ = client.renew_leases();
        });
        let leases = PathBuf::from(LEASE_FOLDER);
        if let Some(Bytes(bytes)) = self.shadow {
            return Ok(pager.start_shadow(ShadowOptions { folder: leases, bytes, ask })?);
        }
        let (store, swap) = (absolute(&self.pages), self.swap());
        pager.allow_eviction(EvictionOptions { leases, store, swap, ask })?;
        if let Some(Bytes(bytes)) = self.limit {
            pager.set_limit(Some(bytes))?;
        }
        Ok(())
    }
}

/// A path that the next pager finds, too, which may begin in another folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether the value of an option is large enough.
pub(super) fn at_least(bytes: u64, least: u64, option: &str) -> CommandResult {
    if bytes >= least {
        return Ok(());
    }
    let text = format!("{option} needs at least {}", Bytes(least));
    Err(Failure::new(text).advise("give more"))
}
