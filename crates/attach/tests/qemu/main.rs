//! Attaching to a real QEMU, which runs its firmware: every step of pager and injector killed, and
//! every refusal that can be made here. This program is the pager, the injector and the guard, too.

#![expect(unsafe_code, reason = "a process that traces another, and a mapping")]

mod evictions;
mod holder;
mod kills;
mod machine;
mod refusals;
mod roles;
mod swaps;
mod users;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("it_attaches_and_detaches_a_hundred_times", kills::it_attaches_and_detaches_a_hundred_times),
    ("a_vmm_of_another_user_in_a_sandbox", kills::a_vmm_of_another_user_in_a_sandbox),
    ("an_injector_killed_at_each_step", kills::an_injector_killed_at_each_step),
    ("an_injector_that_is_stopped", kills::an_injector_that_is_stopped),
    ("a_pager_killed_at_each_step", kills::a_pager_killed_at_each_step),
    ("a_guard_that_is_killed_is_replaced", kills::a_guard_that_is_killed_is_replaced),
    ("two_pagers_are_one_too_many", kills::two_pagers_are_one_too_many),
    ("pages_leave_and_a_limit_changes", evictions::pages_leave_and_a_limit_changes),
    ("pagers_killed_with_pages_away", evictions::pagers_killed_with_pages_away),
    ("guards_killed_with_pages_away", evictions::guards_killed_with_pages_away),
    ("a_foreign_process_has_all_pages_come_in", evictions::a_foreign_process_has_all_pages_come_in),
    ("a_store_without_room", evictions::a_store_without_room),
    ("a_damaged_store", evictions::a_damaged_store),
    (
        "a_machine_that_ends_while_a_guard_serves",
        evictions::a_machine_that_ends_while_a_guard_serves,
    ),
    ("what_has_no_limit", evictions::what_has_no_limit),
    ("pages_in_a_swap_file", swaps::pages_in_a_swap_file),
    ("pagers_killed_with_a_swap_file", swaps::pagers_killed_with_a_swap_file),
    ("a_swap_file_that_hangs", swaps::a_swap_file_that_hangs),
    ("a_daemon_of_another_user", users::a_daemon_of_another_user),
    (
        "a_fathom_that_is_not_of_root_has_all_pages_come_in",
        users::a_fathom_that_is_not_of_root_has_all_pages_come_in,
    ),
    ("a_daemon_that_means_harm", users::a_daemon_that_means_harm),
    ("a_daemon_that_holds_the_kernels_locks", users::a_daemon_that_holds_the_kernels_locks),
    ("memory_that_is_not_shared", refusals::memory_that_is_not_shared),
    ("memory_on_a_disk_and_in_huge_pages", refusals::memory_on_a_disk_and_in_huge_pages),
    ("locked_memory", refusals::locked_memory),
    ("another_process_that_maps_the_memory", refusals::another_process_that_maps_the_memory),
    ("a_vmm_that_is_traced", refusals::a_vmm_that_is_traced),
    ("a_user_without_the_right", refusals::a_user_without_the_right),
    ("memory_that_another_userfaultfd_has", refusals::memory_that_another_userfaultfd_has),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(status) = roles::play(&arguments) {
        return status;
    }
    if let Err(reason) = machine::can_run() {
        println!("Skipped: {reason}");
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let mut failed = 0;
    for (name, test) in TESTS {
        if filter.is_some_and(|filter| !name.contains(filter.as_str())) {
            continue;
        }
        let outcome = catch_unwind(AssertUnwindSafe(test));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        failed += u32::from(outcome.is_err());
    }
    ExitCode::from(u8::from(failed > 0))
}
