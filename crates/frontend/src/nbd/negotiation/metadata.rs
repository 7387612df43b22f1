//! The options that list and choose metadata contexts.

use super::super::bitmaps::{BITMAPS_MAX, BitmapRefusal};
use super::super::wire::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, DIRTY_BITMAP, DIRTY_BITMAP_ID, Mode, option, read_u32,
    reply,
};
use super::{Catalogue, Negotiation, acknowledge, answer, counted_string, finish, refuse};

/// The most bitmaps that are listed.
const LISTED_MAX: usize = 1000;

/// The contexts that a client has chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    /// Whether `base:allocation` is one of them.
    pub base_allocation: bool,
    /// The bitmaps; the numbers of their contexts count from [`DIRTY_BITMAP_ID`].
    pub bitmaps: Vec<String>,
}

impl Contexts {
    /// Whether none is chosen.
    pub fn is_empty(&self) -> bool {
        !self.base_allocation && self.bitmaps.is_empty()
    }
}

/// The contexts that the queries name.
#[derive(Default)]
struct Queried<'a> {
    /// `base:allocation`.
    allocation: bool,
    /// Bitmaps, each once.
    bitmaps: Vec<&'a str>,
    /// Whether all contexts of this kind are listed.
    all_base: bool,
    all_bitmaps: bool,
}

impl Negotiation {
    pub(super) fn meta_context<C: Catalogue>(
        &mut self,
        code: u32,
        data: &[u8],
        output: &mut Vec<u8>,
        catalogue: &C,
    ) {
        let sets = code == option::SET_META_CONTEXT;
        if sets {
            // The earlier choice is void, even if this one fails.
            self.chosen = None;
        }
        if self.mode == Mode::Simple {
            refuse(output, code, reply::ERROR_INVALID, "structured replies must be agreed first");
            return;
        }
        let Some((name, queried)) = queries(data) else {
            refuse(output, code, reply::ERROR_INVALID, "the option's lengths are inconsistent");
            return;
        };
        let Some((export, description)) = catalogue.find(name) else {
            refuse(output, code, reply::ERROR_UNKNOWN, "no export of this name");
            return;
        };
        if queried.bitmaps.len() > BITMAPS_MAX {
            refuse(output, code, reply::ERROR_TOO_BIG, "too many contexts");
            return;
        }
        let mut bitmaps = Vec::new();
        for name in queried.bitmaps {
            match catalogue.find_bitmap(&export, name) {
                Ok(()) => bitmaps.push(name.to_owned()),
                Err(BitmapRefusal::Unknown) => {}
                Err(BitmapRefusal::Unavailable(why)) => {
                    refuse(output, code, reply::ERROR_POLICY, &why);
                    return;
                }
            }
        }
        if sets {
            set(queried.allocation, &bitmaps, output);
            let base_allocation = queried.allocation;
            self.chosen = Some((description.name, Contexts { base_allocation, bitmaps }));
        } else {
            if queried.all_bitmaps {
                bitmaps = catalogue.bitmaps(&export, LISTED_MAX);
            }
            list(queried.allocation || queried.all_base, &bitmaps, output);
        }
        acknowledge(output, code);
    }
}

fn set(base_allocation: bool, bitmaps: &[String], output: &mut Vec<u8>) {
    if base_allocation {
        context(output, option::SET_META_CONTEXT, BASE_ALLOCATION_ID, BASE_ALLOCATION, "");
    }
    for (bitmap, id) in bitmaps.iter().zip(DIRTY_BITMAP_ID..) {
        context(output, option::SET_META_CONTEXT, id, DIRTY_BITMAP, bitmap);
    }
}

fn list(base_allocation: bool, bitmaps: &[String], output: &mut Vec<u8>) {
    if base_allocation {
        context(output, option::LIST_META_CONTEXT, 0, BASE_ALLOCATION, "");
    }
    for bitmap in bitmaps {
        context(output, option::LIST_META_CONTEXT, 0, DIRTY_BITMAP, bitmap);
    }
}

/// Appends the reply that names a context.
fn context(output: &mut Vec<u8>, code: u32, id: u32, kind: &str, name: &str) {
    let begin = answer(output, code, reply::META_CONTEXT);
    output.extend(id.to_be_bytes());
    output.extend(kind.as_bytes());
    output.extend(name.as_bytes());
    finish(output, begin);
}

/// Parses the data of the options: a name, a count, and that many counted strings. Returns the name
/// and the named contexts. Without any query, all are listed.
fn queries(data: &[u8]) -> Option<(&str, Queried<'_>)> {
    let (name, rest) = counted_string(data)?;
    let count = read_u32(rest, 0)?;
    let mut rest = rest.get(4..)?;
    let mut queried = Queried::default();
    (queried.all_base, queried.all_bitmaps) = (count == 0, count == 0);
    for _ in 0..count {
        let (query, behind) = counted_string(rest)?;
        match query.strip_prefix(DIRTY_BITMAP) {
            Some("") => queried.all_bitmaps = true,
            Some(bitmap) if !queried.bitmaps.contains(&bitmap) => queried.bitmaps.push(bitmap),
            Some(_) => {}
            None => {
                queried.allocation |= query == BASE_ALLOCATION;
                queried.all_base |= query == "base:";
                queried.all_bitmaps |= query == "qemu:";
            }
        }
        rest = behind;
    }
    rest.is_empty().then_some((name, queried))
}
