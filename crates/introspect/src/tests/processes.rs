//! The processes of a guest, with their accounts and the calls in which they wait.

use fathom_insight::Names;

use super::SyntheticGuest;
use crate::synthetic::{Shape, UPTIME_NS};

#[test]
fn processes_have_their_accounts_and_calls() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let kernel = guest.kernel().unwrap();
        let names = Names::default();
        let found = kernel.processes(&names);
        assert!(found.is_whole);
        assert_eq!(found.uptime_ns, Some(UPTIME_NS));
        let summary: Vec<_> = found
            .processes
            .iter()
            .map(|process| {
                (process.process_id, process.parent_id, &*process.command, process.threads)
            })
            .collect();
        assert_eq!(
            summary,
            [(1, 0, "systemd", 1), (9, 0, "kworker/0:1", 1), (77, 1, "postgres", 3)]
        );
        let starts: Vec<_> = found.processes.iter().map(|process| process.start_ns).collect();
        assert_eq!(starts, [1, 9, 77].map(|number| Some(number * 1_005_000_000)));
        let [systemd, worker, postgres] = &found.processes[..] else { unreachable!() };
        assert!(worker.is_kernel && !systemd.is_kernel && !postgres.is_kernel);
        assert!(systemd.calls.is_empty() && worker.calls.is_empty());
        // The sum of its threads' accounts and of that of those that have ended.
        assert_eq!(postgres.read_bytes, Some(1110));
        assert_eq!(postgres.dirtied_bytes, Some(2220));
        assert_eq!(postgres.cancelled_bytes, Some(3330));
        assert_eq!(postgres.cgroup, "/batch/job");
        let [call] = &postgres.calls[..] else { panic!("{:?}", postgres.calls) };
        assert_eq!((call.thread_id, call.call, call.is_uninterruptible), (4000, "fsync", true));
        let text = |name| names.text(name).unwrap_or_default().to_string();
        assert_eq!(text(call.file.path), "/var/lib/db/main.db");
        assert_eq!((text(call.file.file_system), call.file.inode), ("ext4".into(), 140));
        assert!(call.source.is_none());
    }
}

#[test]
fn a_torn_list_ends_and_is_reported() {
    let synthetic = SyntheticGuest::new(&Shape::recent());
    let guest = synthetic.guest();
    let kernel = guest.kernel().unwrap();
    let names = Names::default();
    let first = kernel.places.first_task.unwrap();
    let list = kernel.layout.task_list;
    let second = kernel.u64(first + list).unwrap();
    // The list leads back to its second task, and never to its beginning.
    let place = kernel.physical(second).unwrap();
    let before = kernel.memory.u64(place).unwrap();
    synthetic.store.write_u64(place, second);
    let found = kernel.processes(&names);
    assert!(!found.is_whole && found.processes.len() == 1);
    // A thread's list without an end.
    synthetic.store.write_u64(place, before);
    let task = second - list;
    let thread = kernel.layout.task_thread.unwrap();
    let place = kernel.physical(task + thread).unwrap();
    synthetic.store.write_u64(place, task + thread);
    let found = kernel.processes(&names);
    assert!(!found.is_whole && found.processes.is_empty());
}
