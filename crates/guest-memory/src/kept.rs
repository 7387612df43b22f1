//! What a guard keeps.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::pager::Lease;

/// A lease, or a mapping, or neither, which is usual. Then it is one word, which is tested once.
#[derive(Debug)]
pub(crate) struct Kept(ManuallyDrop<Option<Box<Things>>>);

#[derive(Debug)]
struct Things {
    _lease: Option<Lease>,
    _map: Option<Arc<Mapping>>,
}

impl Kept {
    pub(crate) const NOTHING: Self = Self(ManuallyDrop::new(None));

    /// Keeps the lease of a memory with a pager.
    pub(crate) fn lease(lease: Lease) -> Self {
        Self::new(Some(lease), None)
    }

    pub(crate) fn new(lease: Option<Lease>, map: Option<Arc<Mapping>>) -> Self {
        Self(ManuallyDrop::new(Some(Box::new(Things { _lease: lease, _map: map }))))
    }
}

impl Drop for Kept {
    #[inline]
    fn drop(&mut self) {
        // Passed by value, so that a guard can be in registers.
        if let Some(things) = self.0.take() {
            release(things);
        }
    }
}

#[cold]
#[inline(never)]
fn release(things: Box<Things>) {
    drop(things);
}
