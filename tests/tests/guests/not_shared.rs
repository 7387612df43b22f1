//! The commonest mistake of whoever attaches a guest: its memory is not shared with the daemon.

use std::time::Duration;

use fathom_control::ProblemKind;
use fathom_tests::{Daemon, Process, Qemu, Result, Served, patience, until};

/// QEMU's firmware is enough to have the rings of the disk started.
const ARGUMENTS: &str = "-accel tcg -machine q35 -m 64 -display none -serial none -monitor none \
                         -device vhost-user-blk-pci,chardev=disk,num-queues=1 -chardev";

#[test]
fn a_guest_whose_memory_is_not_shared_is_told_so_once() -> Result<()> {
    let daemon = Daemon::serve(&[Served::sparse("disk", 16)])?;
    let mut arguments: Vec<String> = ARGUMENTS.split_whitespace().map(str::to_owned).collect();
    let socket = daemon.path("disk.sock");
    let program = Qemu::current()?;
    // It comes back by itself, as libvirt has it.
    let again = program.reconnect_option();
    arguments.push(format!("socket,id=disk,path={},{again}", socket.display()));
    let qemu = Process::start(program.binary(), &arguments, &daemon.path("qemu.log"))?;
    let problem = until("the daemon to say what is wrong", patience(60), || {
        qemu.expect_running()?;
        Ok(daemon.status("disk")?.problems.into_iter().next())
    })?;
    assert_eq!(problem.kind, ProblemKind::VmmRefused, "{problem:?}");
    let text = format!("{} {}", problem.message, problem.remedy);
    assert!(text.contains("share=on") && text.contains("<access mode='shared'/>"), "{text}");
    let connections = daemon.guest("disk")?.connections;
    until("QEMU to try again", patience(60), || {
        qemu.expect_running()?;
        Ok((daemon.guest("disk")?.connections >= connections + 3).then_some(()))
    })?;
    std::thread::sleep(Duration::from_millis(200));
    let said = daemon.log().lines().filter(|line| line.contains("the VMM is let go")).count();
    assert_eq!(said, 1, "{}", daemon.log());
    assert_eq!(daemon.guest("disk")?.protocol_errors, 0);
    assert!(!daemon.log().contains("broke the vhost-user protocol"), "{}", daemon.log());
    Ok(())
}
