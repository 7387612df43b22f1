//! The most common mistake in connecting a guest: its memory is not shared with the daemon.

use std::time::Duration;

use fathom_control::ProblemKind;
use fathom_tests::{Daemon, Process, Qemu, Result, Served, patience, until};

/// Arguments of QEMU. Its firmware is sufficient to start the rings of the disk and to read the
/// first sector.
const ARGUMENTS: &str = "-accel tcg -machine q35 -m 64 -display none -serial none -monitor none \
                         -device vhost-user-blk-pci,chardev=disk,num-queues=2 -chardev";

/// Starts QEMU with the disk of `daemon` and the arguments `more`.
fn start(daemon: &Daemon, more: &[&str]) -> Result<Process> {
    let mut arguments: Vec<String> = ARGUMENTS.split_whitespace().map(str::to_owned).collect();
    let socket = daemon.path("disk.sock");
    let program = Qemu::current()?;
    // QEMU reconnects automatically, as under libvirt.
    let again = program.reconnect_option();
    arguments.push(format!("socket,id=disk,path={},{again}", socket.display()));
    arguments.extend(more.iter().map(|argument| (*argument).to_owned()));
    Process::start(program.binary(), &arguments, &daemon.path("qemu.log"))
}

/// The number of lines of the daemon's log that contain `text`.
fn lines(daemon: &Daemon, text: &str) -> usize {
    daemon.log().lines().filter(|line| line.contains(text)).count()
}

#[test]
fn a_guest_whose_memory_is_not_shared_is_reported_once() -> Result<()> {
    let daemon = Daemon::serve(&[Served::sparse("disk", 16)])?;
    let qemu = start(&daemon, &[])?;
    let problem = until("the daemon to report the problem", patience(60), || {
        qemu.expect_running()?;
        Ok(daemon.status("disk")?.problems.into_iter().next())
    })?;
    assert_eq!(problem.kind, ProblemKind::VmmRefused, "{problem:?}");
    let text = format!("{} {}", problem.message, problem.remedy);
    assert!(text.contains("share=on") && text.contains("<access mode='shared'/>"), "{text}");
    let connections = daemon.guest("disk")?.connections;
    until("QEMU to reconnect", patience(60), || {
        qemu.expect_running()?;
        Ok((daemon.guest("disk")?.connections >= connections + 3).then_some(()))
    })?;
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(lines(&daemon, "the VMM is disconnected"), 1, "{}", daemon.log());
    assert_eq!(daemon.guest("disk")?.protocol_errors, 0);
    assert!(!daemon.log().contains("broke the vhost-user protocol"), "{}", daemon.log());
    Ok(())
}

#[test]
fn a_guest_whose_memory_is_mapped_privately_is_reported_once() -> Result<()> {
    let daemon = Daemon::serve(&[Served::sparse("disk", 16)])?;
    let folder = daemon.path("memory");
    std::fs::create_dir(&folder)?;
    let of_file = format!("memory-backend-file,mem-path={}", folder.display());
    for kind in ["memory-backend-memfd", of_file.as_str()] {
        let memory = format!("{kind},id=memory,size=64M,share=off");
        let before = lines(&daemon, "problem memory-not-shared");
        let qemu = start(&daemon, &["-object", &memory, "-machine", "memory-backend=memory"])?;
        // The ring's own thread notices the problem, without a query of the status.
        until("the daemon to log the problem", patience(60), || {
            qemu.expect_running()?;
            Ok((lines(&daemon, "problem memory-not-shared") > before).then_some(()))
        })?;
        let problem = daemon.status("disk")?.problems.remove(0);
        assert_eq!(problem.kind, ProblemKind::MemoryNotShared, "{problem:?}");
        let text = format!("{} {}", problem.message, problem.remedy);
        assert!(text.contains("share=on") && text.contains("<access mode='shared'/>"), "{text}");
        std::thread::sleep(Duration::from_secs(3));
        qemu.expect_running()?;
        assert_eq!(lines(&daemon, "problem memory-not-shared"), before + 1, "{}", daemon.log());
        assert!(daemon.guest("disk")?.connected, "the problem is only a warning");
        drop(qemu);
        until("the problem to end", patience(60), || {
            Ok(daemon.status("disk")?.problems.is_empty().then_some(()))
        })?;
    }
    Ok(())
}

#[test]
fn a_guest_with_shared_memory_that_uses_only_some_queues_causes_no_problem() -> Result<()> {
    let daemon = Daemon::serve(&[Served::sparse("disk", 16)])?;
    let memory = "memory-backend-memfd,id=memory,size=64M,share=on";
    let qemu = start(&daemon, &["-object", memory, "-machine", "memory-backend=memory"])?;
    until("the firmware to read the disk", patience(60), || {
        qemu.expect_running()?;
        Ok((daemon.count("disk", "read")? > 0).then_some(()))
    })?;
    std::thread::sleep(Duration::from_secs(3));
    let problems = daemon.status("disk")?.problems;
    assert!(problems.is_empty(), "{problems:?}");
    Ok(())
}
