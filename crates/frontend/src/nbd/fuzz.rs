//! Entry points for fuzzing: arbitrary bytes of a client.

use super::bitmaps::{BITMAPS_MAX, BitmapRefusal};
use super::negotiation::{Catalogue, Description, Negotiation, Security, Step};
use super::wire::{Mode, RequestHeader};

/// A catalogue of two exports without disks.
struct TwoExports;

impl TwoExports {
    fn description(name: &str) -> Description {
        Description {
            name: name.to_owned(),
            text: "for fuzzing".to_owned(),
            capacity: 1 << 40,
            flags: u16::MAX,
            block_minimum: 1,
            block_preferred: 4096,
            block_maximum: 32 << 20,
        }
    }
}

impl Catalogue for TwoExports {
    type Export = ();

    fn find(&self, name: &str) -> Option<((), Description)> {
        match name {
            "" | "one" => Some(((), Self::description("one"))),
            "two" => Some(((), Self::description("two"))),
            _ => None,
        }
    }

    fn each(&self, visit: &mut dyn FnMut(&str, &str)) {
        visit("one", "for fuzzing");
        visit("two", "");
    }

    fn bitmaps(&self, (): &(), count: usize) -> Vec<String> {
        (0..10.min(count)).map(|number| number.to_string()).collect()
    }

    fn find_bitmap(&self, (): &(), name: &str) -> Result<(), BitmapRefusal> {
        match name.parse() {
            Ok(0..10) => Ok(()),
            Ok(10) => Err(BitmapRefusal::Unavailable("it is busy".into())),
            _ => Err(BitmapRefusal::Unknown),
        }
    }
}

/// Negotiates with a client that sends `data`: once in one piece, once in small pieces. Panics when
/// the results differ or a limit is exceeded.
#[doc(hidden)]
pub fn fuzz_negotiation(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    let security = match first % 3 {
        0 => Security::Plain,
        1 => Security::Optional,
        _ => Security::Required,
    };
    let whole = negotiate(security, rest, rest.len().max(1));
    let piecemeal = negotiate(security, rest, 1 + usize::from(first / 3) % 7);
    assert_eq!(whole, piecemeal, "the division of the bytes makes no difference");
}

/// Negotiates over `data`, given in pieces. Returns the output, how the negotiation ended, and the
/// number of bytes used.
fn negotiate(security: Security, data: &[u8], piece: usize) -> (Vec<u8>, String, usize) {
    let mut negotiation = Negotiation::new(security);
    let mut output = Vec::new();
    let (mut used, mut given) = (0, 0);
    loop {
        let before = output.len();
        let (count, step) = negotiation.feed(&data[used..given], &mut output, &TwoExports);
        used += count;
        assert!(used <= given, "no more bytes are used than given");
        assert!(output.len() - before < 4096, "an option's answer is bounded");
        match step {
            Step::Again => {}
            Step::Incomplete if given == data.len() => return (output, "incomplete".into(), used),
            Step::Incomplete => given = (given + piece).min(data.len()),
            Step::StartTls => {
                assert_ne!(security, Security::Plain);
                negotiation.secured();
            }
            Step::Transmit(agreement) => {
                assert!(agreement.contexts.is_empty() || agreement.mode != Mode::Simple);
                assert!(agreement.contexts.bitmaps.len() <= BITMAPS_MAX);
                return (output, format!("{agreement:?}"), used);
            }
            Step::Leave => return (output, "left".into(), used),
            Step::Refuse(reason) => return (output, reason.into(), used),
        }
    }
}

/// Parses headers of requests in `data`.
#[doc(hidden)]
pub fn fuzz_requests(data: &[u8]) {
    for mode in [Mode::Simple, Mode::Structured, Mode::Extended] {
        for bytes in data.windows(mode.request_length()) {
            std::hint::black_box(RequestHeader::parse(bytes, mode));
        }
        assert!(data.len() >= mode.request_length() || RequestHeader::parse(data, mode).is_none());
    }
}
