//! Counts the I/O that is needless because the host swaps the guest's memory.
//!
//! Read [`SwapWatchOptions`] first. The layer observes. Before a request is served, it asks the
//! host's kernel which of the request's pages are swapped out ([`GuestPages`]): a read of the disk
//! into such pages brings content in that is then overwritten, and a write brings content in that
//! is then written a second time. While nothing of the guest is swapped out, a request does not
//! ask: somebody calls [`GuestPages::check`] about once a second.
//!
//! A sample of the pages that had the content of a block is followed (`sample`): whether they are
//! swapped out, and whether they still have that content when they are back. The layer never brings
//! a page in to look at it. `docs/pager.md` says what each number means and how exact it is.
//!
//! The talk, *Tesseract: Reconciling Guest I/O and Hypervisor Swapping in a VM* (Arya, Baskakov,
//! Garthwaite), has the kinds of needless I/O.

#[cfg(test)]
mod tests;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_block::{
    Buffers, Capabilities, Figure, GuestAddress, Layer, LayerPart, LayerReport, Observer,
    ObserverPosition, OpenContext, Operation, Outcome, Request,
};
use fathom_failure::Failure;
use fathom_options::Key;
use serde::{Deserialize, Serialize};

use crate::GuestSlot;
use crate::guest_pages::GuestPages;
use crate::guest_pages::sample::{self, Block, DiskCounts, PAGE};
use crate::kind::{LayerContext, LayerOptions, Rank};

/// The time after the last request in which pages are checked, in nanoseconds.
const ACTIVE_NS: u64 = 10_000_000_000;
/// How exactly the time of the last request is kept, in nanoseconds.
const USED_STEP_NS: u64 = 100_000_000;

/// The configuration of the layer `swap-watch`. It has no options.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SwapWatchOptions {}

impl LayerOptions for SwapWatchOptions {
    const KIND: &'static str = "swap-watch";
    const RANK: Rank = Rank::Pattern;
    const MEANING: &'static str = "counts the I/O that is needless because the host swaps the guest's memory ([pager](pager.md))";
    const KEYS: &'static [Key] = &[];
    const ONCE: Option<&'static str> = Some("it would count everything twice");
    const BENEATH: Option<&'static str> =
        Some("it does not see requests that the layers above hold or answer");

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        let guest = context.guest.map(Arc::clone).unwrap_or_default();
        Ok(Some(Arc::new(SwapWatch::new(guest))))
    }
}

struct Shared {
    slot: Arc<GuestSlot>,
    counts: Arc<DiskCounts>,
    /// The time of the last request with pages, in nanoseconds of the stack's clock.
    used_ns: AtomicU64,
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Queues that ended their examination because of a bug.
    failures: AtomicU64,
}

/// The layer that counts needless I/O.
#[derive(Clone)]
pub struct SwapWatch {
    shared: Arc<Shared>,
}

/// What was counted of a disk since it has the layer. Of an estimate there are the events of the
/// sample, on which its error depends, and the bytes for which they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapWatchSnapshot {
    /// Requests whose pages were looked up, because pages of the guest were swapped out.
    pub examined: u64,
    /// Reads of the disk into whole pages that were swapped out.
    pub stale_requests: u64,
    /// The bytes of these pages.
    pub stale_bytes: u64,
    /// Writes to the disk from pages that were swapped out.
    pub double_requests: u64,
    /// The bytes of these pages.
    pub double_bytes: u64,
    /// Pages with the content of a block that were swapped out, however often.
    pub out: SampleCount,
    /// Those that came back with the content of the block.
    pub silent: SampleCount,
    /// Those that came back with another content.
    pub changed: SampleCount,
    /// Blocks that were read again while the page that had them was swapped out.
    pub reread: SampleCount,
}

/// An estimate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleCount {
    /// The pages of the sample.
    pub pages: u64,
    /// The bytes for which they stand.
    pub bytes: u64,
}

impl SwapWatch {
    /// A layer that has counted nothing. `slot` has the guest's memory.
    pub fn new(slot: Arc<GuestSlot>) -> Self {
        let (counts, used_ns, failures) = Default::default();
        let shared = Shared { slot, counts, used_ns, wake: OnceLock::new(), failures };
        Self { shared: Arc::new(shared) }
    }

    /// The layer, if it is one of this kind.
    pub fn of(layer: &dyn Layer) -> Option<&Self> {
        layer.as_any()?.downcast_ref()
    }

    /// Whether the disk was used lately, at `now_ns` of the stack's clock.
    pub fn is_due(&self, now_ns: u64) -> bool {
        is_active(&self.shared, now_ns)
    }

    /// Calls `wake` whenever [`is_due`](Self::is_due) becomes true, in the thread of a queue.
    pub fn on_use(&self, wake: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.wake.set(Box::new(wake));
    }

    /// What was counted.
    pub fn snapshot(&self) -> SwapWatchSnapshot {
        let counts = &self.shared.counts;
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let estimate =
            |of: &sample::Estimate| SampleCount { pages: load(&of.pages), bytes: load(&of.bytes) };
        SwapWatchSnapshot {
            examined: load(&counts.examined),
            stale_requests: load(&counts.stale_requests),
            stale_bytes: load(&counts.stale_bytes),
            double_requests: load(&counts.double_requests),
            double_bytes: load(&counts.double_bytes),
            out: estimate(&counts.out),
            silent: estimate(&counts.silent),
            changed: estimate(&counts.changed),
            reread: estimate(&counts.reread),
        }
    }
}

fn is_active(shared: &Shared, now_ns: u64) -> bool {
    let used_ns = shared.used_ns.load(Ordering::Relaxed);
    used_ns > 0 && now_ns.saturating_sub(used_ns) < ACTIVE_NS
}

impl Layer for SwapWatch {
    fn name(&self) -> &'static str {
        SwapWatchOptions::KIND
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let failures = self.shared.failures.load(Ordering::Relaxed);
        LayerReport { figures: figures(&self.snapshot(), failures), problems: Vec::new() }
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::observer(SwapWatchQueue {
            shared: Arc::clone(&self.shared),
            pages: None,
            generation: 0,
            spans: Vec::new(),
            frames: Vec::new(),
            found: Vec::new(),
            page: Box::new([0; PAGE as usize]),
            has_failed: false,
        }))
    }
}

fn figures(counts: &SwapWatchSnapshot, failures: u64) -> Vec<Figure> {
    vec![
        Figure::counter(
            "examined_requests_total",
            "Requests whose pages were looked up, because pages of the guest were swapped out.",
            counts.examined,
        ),
        Figure::counter(
            "stale_read_requests_total",
            "Reads of the disk into whole pages that the host had swapped out.",
            counts.stale_requests,
        ),
        Figure::counter(
            "stale_read_bytes_total",
            "Pages that the host had swapped out and that were read into: it brought their old content in for nothing.",
            counts.stale_bytes,
        ),
        Figure::counter(
            "double_paging_requests_total",
            "Writes to the disk from pages that the host had swapped out.",
            counts.double_requests,
        ),
        Figure::counter(
            "double_paging_bytes_total",
            "Pages that the host had swapped out and brought in only to be written to the disk.",
            counts.double_bytes,
        ),
        Figure::counter(
            "swapped_out_bytes_total",
            "Pages with the content of a block of the disk that the host has swapped out: an estimate.",
            counts.out.bytes,
        ),
        Figure::counter(
            "silent_write_bytes_total",
            "Those of them that came back with the content of the block, which is on the disk: an estimate, which is too low.",
            counts.silent.bytes,
        ),
        Figure::counter(
            "changed_bytes_total",
            "Those of them that came back with another content: an estimate.",
            counts.changed.bytes,
        ),
        Figure::counter(
            "reread_bytes_total",
            "Blocks that the guest read again while the page that had them was swapped out: an estimate, which is too high.",
            counts.reread.bytes,
        ),
        Figure::counter(
            "failures_total",
            "Queues that ended the examination because of a bug.",
            failures,
        ),
    ]
}

/// Contiguous memory of a request.
#[derive(Clone, Copy)]
struct Span {
    /// The guest-physical address.
    address: u64,
    /// The offset of its content in the request, in bytes.
    offset: u64,
    length: u64,
}

impl Span {
    /// The numbers of the pages of which it has all bytes.
    fn whole(self) -> std::ops::Range<u64> {
        let first = self.address.div_ceil(PAGE);
        first..(self.address.saturating_add(self.length) / PAGE).max(first)
    }

    /// The numbers of the pages of which it has a part.
    fn touched(self) -> std::ops::Range<u64> {
        sample::blocks(self.address, self.length)
    }
}

/// The length of each segment of a request, and its guest-physical address.
fn segments(buffers: &Buffers) -> impl Iterator<Item = (u64, Option<u64>)> + '_ {
    let lengths = buffers.segments().iter().map(|segment| segment.iov_len as u64);
    lengths.zip(buffers.addresses().iter().map(|address| address.map(|GuestAddress(it)| it)))
}

/// The memory of a request in the guest's memory, contiguous segments as one.
fn find_spans(segments: impl Iterator<Item = (u64, Option<u64>)>, spans: &mut Vec<Span>) {
    spans.clear();
    let mut offset = 0;
    for (length, address) in segments {
        if let Some(address) = address {
            match spans.last_mut() {
                Some(last)
                    if last.address.checked_add(last.length) == Some(address)
                        && last.offset + last.length == offset =>
                {
                    last.length += length;
                }
                _ => spans.push(Span { address, offset, length }),
            }
        }
        offset += length;
    }
}

struct SwapWatchQueue {
    shared: Arc<Shared>,
    pages: Option<Arc<GuestPages>>,
    /// The generation of the slot's memory that `pages` is.
    generation: u64,
    /// What follows is used again by each request.
    spans: Vec<Span>,
    frames: Vec<u64>,
    found: Vec<(u64, Block)>,
    page: Box<[u8; PAGE as usize]>,
    has_failed: bool,
}

impl SwapWatchQueue {
    /// Follows a change of the guest's memory.
    fn follow(&mut self) {
        if self.shared.slot.pages_generation() != self.generation {
            if let Some((generation, pages)) = self.shared.slot.try_pages() {
                (self.generation, self.pages) = (generation, pages);
            }
        }
    }

    /// Notes that the disk is used. After a pause, requests look until the pages were checked.
    fn note_use(&self, pages: &GuestPages, now_ns: u64) {
        let used_ns = self.shared.used_ns.load(Ordering::Relaxed);
        if now_ns.saturating_sub(used_ns) < USED_STEP_NS {
            return;
        }
        let was_active = is_active(&self.shared, now_ns);
        self.shared.used_ns.store(now_ns.max(1), Ordering::Relaxed);
        if !was_active {
            pages.wake();
            if let Some(wake) = self.shared.wake.get() {
                wake();
            }
        }
    }

    fn request_down(&mut self, pages: &GuestPages, request: &Request) {
        let counts = Arc::clone(&self.shared.counts);
        let is_read = match request.operation {
            Operation::Read => true,
            Operation::Write => false,
            Operation::Discard | Operation::WriteZeroes => {
                pages.forget_blocks(&counts, request.offset, request.length);
                return;
            }
            Operation::Flush | Operation::GetId | Operation::Extents => return,
        };
        find_spans(segments(&request.buffers), &mut self.spans);
        if pages.may_be_out() && !self.spans.is_empty() {
            self.look(pages, &counts, is_read);
        }
        if is_read {
            pages.reread(&counts, request.offset, request.length);
            self.find_frames(pages);
            pages.overwrite(&self.frames);
        } else {
            pages.forget_blocks(&counts, request.offset, request.length);
        }
    }

    /// Asks which pages of the request are swapped out, and counts them.
    fn look(&mut self, pages: &GuestPages, counts: &DiskCounts, is_read: bool) {
        let mut swapped = 0;
        for span in &self.spans {
            // A page that is read into in part has to come in.
            let frames = if is_read { span.whole() } else { span.touched() };
            let length = (frames.end - frames.start) * PAGE;
            if length > 0 {
                swapped += pages.swapped(frames.start * PAGE, length);
            }
        }
        counts.examined.fetch_add(1, Ordering::Relaxed);
        if swapped == 0 {
            return;
        }
        let (requests, bytes) = if is_read {
            (&counts.stale_requests, &counts.stale_bytes)
        } else {
            (&counts.double_requests, &counts.double_bytes)
        };
        requests.fetch_add(1, Ordering::Relaxed);
        bytes.fetch_add(swapped, Ordering::Relaxed);
        self.find_frames(pages);
        pages.look(&self.frames);
    }

    /// Finds the pages of the request that are in the sample if they have a block.
    fn find_frames(&mut self, pages: &GuestPages) {
        self.frames.clear();
        let all = self.spans.iter().flat_map(|span| span.touched());
        self.frames.extend(all.filter(|frame| pages.is_sampled(*frame)));
    }

    fn request_up(&mut self, pages: &GuestPages, request: &Request, is_ok: bool) {
        let counts = &self.shared.counts;
        match request.operation {
            Operation::Read => {}
            Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                pages.forget_blocks(counts, request.offset, request.length);
            }
            Operation::Flush | Operation::GetId | Operation::Extents => return,
        }
        if !is_ok || !request.operation.carries_data() || !pages.is_sampling() {
            return;
        }
        find_spans(segments(&request.buffers), &mut self.spans);
        for span in &self.spans {
            for frame in span.whole().filter(|frame| pages.is_sampled(*frame)) {
                let offset = span.offset + (frame * PAGE - span.address);
                if request.buffers.copy_to(offset, &mut *self.page) < PAGE as usize {
                    continue;
                }
                let checksum = pages.checksum(&*self.page);
                let offset = request.offset + offset;
                self.found.push((frame, Block { disk: Arc::clone(counts), offset, checksum }));
            }
        }
        pages.associate(&mut self.found);
    }

    /// Does what must not fail a request.
    fn guarded(&mut self, examine: impl FnOnce(&mut Self, &GuestPages)) {
        if self.has_failed {
            return;
        }
        self.follow();
        let Some(pages) = self.pages.clone() else { return };
        if catch_unwind(AssertUnwindSafe(|| examine(self, &pages))).is_err() {
            self.has_failed = true;
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Observer for SwapWatchQueue {
    fn refresh(&mut self) {
        self.follow();
    }

    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        self.guarded(|queue, pages| {
            queue.note_use(pages, place.round_ns());
            for request in &*requests {
                queue.request_down(pages, request);
            }
        });
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], _: ObserverPosition<'_>) {
        self.guarded(|queue, pages| {
            for (request, outcome) in &*requests {
                queue.request_up(pages, request, outcome.is_ok());
            }
        });
    }
}
