//! Control groups: from a subsystem's state to the group's path.

use fathom_insight::{Name, Names};

use crate::kernel::Kernel;

/// Groups are nested no deeper than this.
const DEPTH_MAX: usize = 64;
/// A group's own name is no longer than this is looked at, in bytes.
const NAME_MAX: usize = 255;
/// The groups that a queue remembers; a power of two.
const GROUPS: usize = 256;
/// A path is asked for again after this time: groups can be renamed, texts forgotten.
const FRESH_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Default)]
struct Entry {
    /// The kernel's own number of the state: it gives out none twice. 0 is an empty place.
    serial: u64,
    state: u64,
    name: Name,
    read_ns: u64,
}

/// The groups that were met.
pub(crate) struct GroupCache {
    entries: Box<[Entry]>,
}

impl Default for GroupCache {
    fn default() -> Self {
        Self { entries: vec![Entry::default(); GROUPS].into() }
    }
}

impl GroupCache {
    /// The path of the group that the `cgroup_subsys_state` at `state` belongs to.
    pub fn name(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        state: u64,
        now_ns: u64,
    ) -> Option<Name> {
        let layout = &kernel.layout;
        let serial = match layout.css_serial {
            Some(serial) => kernel.u64(state.wrapping_add(serial))?,
            None => state,
        };
        let mixed = serial.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let entry = &mut self.entries[mixed as usize & (GROUPS - 1)];
        if (entry.serial, entry.state) == (serial, state)
            && now_ns.saturating_sub(entry.read_ns) < FRESH_NS
        {
            return Some(entry.name);
        }
        let name = names.number(&path(kernel, state)?);
        *entry = Entry { serial, state, name, read_ns: now_ns };
        Some(name)
    }
}

/// The path of the group of a subsystem's state: `/` for the root.
fn path(kernel: &Kernel, state: u64) -> Option<String> {
    let layout = &kernel.layout;
    let group = kernel.pointer(state.wrapping_add(layout.css_cgroup?))?;
    let mut node = kernel.pointer(group.wrapping_add(layout.cgroup_node?))?;
    let (name, parent) = (layout.node_name?, layout.node_parent?);
    let mut parts = Vec::new();
    loop {
        let above = kernel.u64(node.wrapping_add(parent))?;
        if above == 0 {
            break;
        }
        let text = kernel.pointer(node.wrapping_add(name))?;
        parts.push(kernel.text(text, NAME_MAX)?);
        if parts.len() > DEPTH_MAX {
            return None;
        }
        node = above;
    }
    if parts.is_empty() {
        return Some("/".to_owned());
    }
    let mut path = String::new();
    for part in parts.iter().rev() {
        path.push('/');
        path.push_str(part);
    }
    Some(path)
}
