//! Control groups: the path of the group of a subsystem's state.

use fathom_insight::{Name, Names};

use crate::kernel::Kernel;

/// The deepest nesting of groups.
const DEPTH_MAX: usize = 64;
/// The most groups examined for one request, on the paths to their roots.
const STEPS_MAX: u32 = 1024;
/// The longest name of a group that is read, in bytes.
const NAME_MAX: usize = 255;
/// The number of groups in a queue's cache; a power of two.
const GROUPS: usize = 256;
/// The age at which a cached path is read again: groups can be renamed, and the table of names can
/// drop texts.
const FRESH_NS: u64 = 1_000_000_000;

/// A control group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ControlGroup {
    /// The group's path.
    pub name: Name,
    /// Whether it is the root group.
    pub is_root: bool,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// The kernel's serial number of the state, which is never reused. 0 marks an empty entry.
    serial: u64,
    state: u64,
    group: ControlGroup,
    read_ns: u64,
}

/// A cache of groups.
pub(crate) struct GroupCache {
    entries: Box<[Entry]>,
    /// The number of steps left for the current request.
    steps: u32,
}

impl Default for GroupCache {
    fn default() -> Self {
        Self { entries: vec![Entry::default(); GROUPS].into(), steps: STEPS_MAX }
    }
}

impl GroupCache {
    /// Begins a request: resets the number of steps.
    pub fn begin(&mut self) {
        self.steps = STEPS_MAX;
    }

    /// The group of the `cgroup_subsys_state` at `state`.
    pub fn group(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        state: u64,
        now_ns: u64,
    ) -> Option<ControlGroup> {
        let layout = &kernel.layout;
        let serial = match layout.css_serial {
            Some(serial) => kernel.object(state).u64(serial)?,
            None => state,
        };
        let mixed = serial.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let entry = &mut self.entries[mixed as usize & (GROUPS - 1)];
        if (entry.serial, entry.state) == (serial, state)
            && now_ns.saturating_sub(entry.read_ns) < FRESH_NS
        {
            return Some(entry.group);
        }
        let path = path(kernel, state, &mut self.steps)?;
        let group = ControlGroup { name: names.number(&path), is_root: path == "/" };
        *entry = Entry { serial, state, group, read_ns: now_ns };
        Some(group)
    }
}

/// The path of the group of a subsystem's state; `/` for the root.
fn path(kernel: &Kernel, state: u64, steps: &mut u32) -> Option<String> {
    let layout = &kernel.layout;
    let group = kernel.pointer(state.wrapping_add(layout.css_cgroup?))?;
    let mut node = kernel.pointer(group.wrapping_add(layout.cgroup_node?))?;
    // These structures check each other: a group contains a state that points back to the group.
    let own = layout.cgroup_self.map(|own| own.wrapping_add(layout.css_cgroup.unwrap_or(0)));
    if own.is_some_and(|own| kernel.u64(group.wrapping_add(own)) != Some(group)) {
        return None;
    }
    let (name, parent) = (layout.node_name?, layout.node_parent?);
    let mut parts = Vec::new();
    loop {
        *steps = steps.checked_sub(1)?;
        if let Some(place) = layout.node_owner {
            let owner = kernel.pointer(node.wrapping_add(place))?;
            if kernel.u64(owner.wrapping_add(layout.cgroup_node?))? != node {
                return None;
            }
        }
        let above = kernel.u64(node.wrapping_add(parent))?;
        let text = kernel.pointer(node.wrapping_add(name))?;
        // A name can have any characters but a slash; `text` replaces those that cannot be printed.
        let text = kernel.text(text, NAME_MAX)?;
        // Only the root's name is empty.
        if text.is_empty() != (above == 0) || text.contains('/') {
            return None;
        }
        if above == 0 {
            break;
        }
        parts.push(text);
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
