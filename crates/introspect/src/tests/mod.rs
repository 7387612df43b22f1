//! Tests with synthetic guests and, if there are any, with captured ones.

mod btf;
mod captured;
mod cycles;
mod dirty;
mod facts;
mod floods;
mod guest;
mod image;
mod kallsyms;
mod lives;
mod memory;
mod mutations;
mod paging;
mod plugged;
mod processes;
mod reuse;
mod scribble;
mod tunables;
mod waiters;
mod writers;

use std::sync::Arc;

use fathom_guest_memory::GuestMemory;
use fathom_insight::Names;

use crate::guest::Guest;
use crate::synthetic::{Linux, Shape, Store, attach};

/// A synthetic guest.
struct SyntheticGuest {
    store: Store,
    linux: Linux,
    memory: GuestMemory,
    names: Arc<Names>,
}

impl SyntheticGuest {
    fn new(shape: &Shape) -> Self {
        let store = Store::new(&shape.memory()).unwrap();
        let linux = Linux::build(&store, shape);
        let memory = store.memory();
        Self { store, linux, memory, names: Arc::default() }
    }

    /// A guest with more free room.
    fn roomy() -> Self {
        Self::new(&Shape { room: (2 << 20, 6 << 20), ..Shape::default() })
    }

    /// The address of the header of one of the guest's requests.
    fn header(&self) -> u64 {
        self.linux.requests[0].view.header
    }

    /// The guest, after the search for its kernel.
    fn guest(&self) -> Arc<Guest> {
        attach(&self.memory, &self.names, self.header())
    }
}
