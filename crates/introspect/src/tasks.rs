//! The guest's tasks.

use std::collections::HashSet;

use crate::kernel::Kernel;

/// The most tasks that are returned.
const TASKS_MAX: usize = 1 << 16;
/// The longest name of a command, in bytes (`TASK_COMM_LEN`).
const COMMAND_MAX: usize = 16;

/// A process of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The process number.
    pub process_id: u32,
    /// The command's name, at most 15 bytes.
    pub command: String,
}

impl Kernel {
    /// The current processes (thread groups), including kernel threads but not the idle tasks. A
    /// list that changes while it is read ends early.
    pub fn tasks(&self) -> Vec<Task> {
        let mut tasks = Vec::new();
        // A torn list may lead back to its middle.
        let mut seen = HashSet::new();
        let Some(first) = self.places.first_task else { return tasks };
        let mut task = first;
        while tasks.len() < TASKS_MAX {
            let Some(next) = self.pointer(task.wrapping_add(self.layout.task_list)) else { break };
            task = next.wrapping_sub(self.layout.task_list);
            if task == first || !seen.insert(task) {
                break;
            }
            let Some(found) = self.task(task) else { break };
            tasks.push(found);
        }
        tasks
    }

    /// The process of the `task_struct` at an address.
    pub(crate) fn task(&self, address: u64) -> Option<Task> {
        let process_id = self.u32(address.wrapping_add(self.layout.task_process))?;
        let mut named = address;
        if let Some(place) = self.layout.task_leader {
            named = self.pointer(address.wrapping_add(place))?;
            // The structures check each other, so an invalid address is detected.
            if self.pointer(named.wrapping_add(place)) != Some(named)
                || self.u32(named.wrapping_add(self.layout.task_process)) != Some(process_id)
            {
                return None;
            }
        }
        let command = self.text(named.wrapping_add(self.layout.task_command), COMMAND_MAX)?;
        // Process numbers are below PID_MAX_LIMIT.
        ((1..=4 << 20).contains(&process_id) && !command.is_empty())
            .then_some(Task { process_id, command })
    }
}
