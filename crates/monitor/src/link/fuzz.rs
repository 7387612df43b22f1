//! Entry points for fuzzing: arbitrary bytes of a host and of the centre.

use std::sync::OnceLock;

use fathom_cql::plan::Plan;
use fathom_cql::{Hosts, ParseOptions, split};

use super::frame::{FromCentre, FromHost, Inbox, ROWS_MAX, Sender};
use super::plans::Fragments;
use super::rows::RowsReader;
use crate::replay::Script;

/// The fragments of two queries, as hosts receive them, and the whole queries.
fn fragments() -> &'static [Plan] {
    static PLANS: OnceLock<Vec<Plan>> = OnceLock::new();
    PLANS.get_or_init(|| {
        let text = "select VDisk, Size, Size * 0.5, Size > 8 from IOstream;
                    select VDisk, count(*) from IOstream [range 1 second] group by VDisk";
        let script = Script::prepare(text, &[], ParseOptions::default()).expect("it is a query");
        let plans: Vec<Plan> = script.queries().iter().map(|query| query.plan.clone()).collect();
        let fragments = split(&plans, script.catalog(), Hosts::Many).fragments;
        fragments.into_iter().chain(plans).collect()
    })
}

/// Reads `data` as frames of one side. Panics if a limit is exceeded, or if a frame differs when it
/// is written again.
#[doc(hidden)]
pub fn fuzz_frames(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    let sender = if first & 1 == 0 { Sender::Host } else { Sender::Centre };
    let mut inbox = Inbox::new(sender);
    for piece in rest.chunks(1 + usize::from(first >> 1)) {
        inbox.add(piece);
        while let Ok(Some((kind, bytes))) = inbox.next() {
            assert!(bytes.len() <= ROWS_MAX);
            let mut again = Vec::new();
            match sender {
                Sender::Host => {
                    let Ok(frame) = FromHost::read(kind, bytes) else { return };
                    frame.write(&mut again);
                    take_rows(&frame);
                }
                Sender::Centre => {
                    let Ok(frame) = FromCentre::read(kind, bytes) else { return };
                    frame.write(&mut again);
                    take_plans(&frame);
                }
            }
            assert_eq!(&again[super::frame::HEAD..], bytes, "a frame is written as it was read");
        }
    }
}

fn take_rows(frame: &FromHost<'_>) {
    let FromHost::Rows { fragment, block, .. } = *frame else { return };
    let plans = fragments();
    let mut reader = RowsReader::new(&plans[usize::from(fragment) % plans.len()]);
    let mut corrected = block.to_vec();
    crate::recording::correct(&mut corrected);
    let Ok(changes) = reader.read(&corrected) else { return };
    assert!(changes.rows.len() <= 1 << 16);
    for (time_ns, _, count) in changes.rows {
        assert!((0..=crate::read::LAST_TIME_NS).contains(&time_ns) && count != 0);
    }
}

fn take_plans(frame: &FromCentre<'_>) {
    let FromCentre::Fragments { plans, .. } = *frame else { return };
    let Ok(read) = Fragments::from_bytes(plans) else { return };
    let _ = read.wanted(&crate::streams());
    let _ = read.of_stream(&crate::io_stream());
}
