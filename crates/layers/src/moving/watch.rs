//! The layer that notes what guests change while their disk moves.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{
    Capabilities, Crossing, ErrorKind, Figure, Layer, LayerPart, LayerQueue, LayerReport,
    OpenContext, Outcome, Request,
};

use super::state::MoveState;

/// The word of a write that was held.
const HELD: u64 = 1;

/// The lowest layer of a disk that moves. It notes the regions of each change that has completed,
/// whatever its outcome, before the change completes above.
pub struct MoveWatch {
    state: Arc<MoveState>,
}

impl MoveWatch {
    /// The layer of the move with this state.
    pub fn new(state: Arc<MoveState>) -> Self {
        Self { state }
    }
}

impl Layer for MoveWatch {
    fn name(&self) -> &'static str {
        "move"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let progress = self.state.progress();
        let figures = vec![
            Figure::gauge("left_bytes", "What is still to be copied.", progress.left_bytes),
            Figure::counter(
                "copied_bytes_total",
                "The data that was written to the target.",
                progress.copied_bytes,
            ),
            Figure::counter("passes_total", "The passes over the disk.", progress.passes),
        ];
        LayerReport { figures, problems: Vec::new() }
    }

    fn resizing(&self, _from: u64, _to: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(WatchQueue { state: Arc::clone(&self.state) }))
    }
}

struct WatchQueue {
    state: Arc<MoveState>,
}

impl LayerQueue for WatchQueue {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        let brake_ns = self.state.brake_ns.load(Ordering::Relaxed);
        let is_held = brake_ns > 0
            && request.operation.modifies()
            && !next.is_draining()
            && !self.state.regions.are_marked(&request.range())
            && std::mem::replace(next.word(&mut request), HELD) != HELD;
        if is_held {
            let deadline_ns = next.now_ns().saturating_add(brake_ns);
            return next.hold(request, None, deadline_ns);
        }
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        // A change that has failed may have changed something.
        if request.operation.modifies() {
            self.state.regions.mark(&request.range());
        }
        next.complete(request, outcome);
    }
}
