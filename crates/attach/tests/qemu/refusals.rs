//! Each refusal that can be made here, with a real QEMU.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::machine::{Machine, PagerProcess, until};

/// What a pager says about a machine; nothing was done to it.
fn refusal(machine: &mut Machine) -> String {
    let refused = PagerProcess::start(machine, &[], "attach", "").refused();
    assert_eq!((machine.userfaults(), machine.registered()), (0, 0), "{refused}");
    machine.check();
    refused
}

pub fn memory_that_is_not_shared() {
    let mut machine = Machine::with(&[], "memory-backend-ram,id=m,size=64M", &[]);
    let refused = refusal(&mut machine);
    assert!(refused.contains("not shared") && refused.contains("share=on"), "{refused}");
}

pub fn memory_on_a_disk_and_in_huge_pages() {
    // The folder of this program is on a disk.
    let program = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    let backend = |path: &Path| {
        format!("memory-backend-file,id=m,size=64M,share=on,mem-path={}", path.display())
    };
    let mut machine = Machine::with(&[], &backend(&folder.path().join("memory")), &[]);
    let refused = refusal(&mut machine);
    assert!(refused.contains("not a file in memory"), "{refused}");

    let mount = folder.path().join("huge");
    std::fs::create_dir(&mount).unwrap();
    let mounted = |kind: &str, options: &str| {
        let mut command = Command::new("mount");
        command.args(["-t", kind, "-o", options, "none"]).arg(&mount);
        command.stderr(Stdio::null()).status().unwrap().success()
    };
    for (kind, options) in [("tmpfs", "huge=always,size=100m"), ("hugetlbfs", "size=100m")] {
        if !mounted(kind, options) {
            println!("Skipped: {kind} with {options} cannot be mounted");
            continue;
        }
        let outcome = std::panic::catch_unwind(|| {
            let reserved = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap();
            if kind == "hugetlbfs" && reserved.trim() == "0" {
                println!("Skipped: no huge pages are reserved");
                return;
            }
            let mut machine = Machine::with(&[], &backend(&mount.join("memory")), &[]);
            let refused = refusal(&mut machine);
            assert!(refused.contains("huge pages"), "{refused}");
        });
        assert!(Command::new("umount").arg(&mount).status().unwrap().success());
        outcome.unwrap();
    }
}

pub fn locked_memory() {
    let memory = "memory-backend-memfd,id=m,size=64M,share=on";
    let mut machine = Machine::with(&[], memory, &["-overcommit", "mem-lock=on"]);
    let refused = refusal(&mut machine);
    assert!(refused.contains("locked") && refused.contains("mem-lock"), "{refused}");
}

pub fn another_process_that_maps_the_memory() {
    let mut machine = Machine::start();
    let files = std::fs::read_dir(format!("/proc/{}/fd", machine.process())).unwrap();
    let is_memory = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("memory-backend"))
    };
    let path = files.flatten().map(|file| file.path()).find(is_memory).unwrap();
    let file = File::open(path).unwrap();
    // SAFETY: a new mapping, which nothing reads.
    let mapped = unsafe {
        let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED);
        libc::mmap(std::ptr::null_mut(), 4096, read, shared, file.as_raw_fd(), 0)
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    let refused = refusal(&mut machine);
    let own = format!("process {} ", std::process::id());
    assert!(refused.contains(&own) && refused.contains("also maps"), "{refused}");
    // SAFETY: the mapping of above.
    assert_eq!(unsafe { libc::munmap(mapped, 4096) }, 0);
    let mut pager = PagerProcess::start(&machine, &[], "attach", "");
    pager.attached();
    pager.detach();
}

pub fn a_vmm_that_is_traced() {
    let mut machine = Machine::start();
    let mut tracer = Command::new(std::env::current_exe().unwrap())
        .args(["role-tracer", &machine.process().to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(tracer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "traced\n");
    let refused = refusal(&mut machine);
    assert!(refused.contains(&format!("process {} traces it", tracer.id())), "{refused}");
    tracer.kill().unwrap();
    tracer.wait().unwrap();
    machine.check();
}

pub fn a_user_without_the_right() {
    let other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
    let mut machine = Machine::with(&other, "memory-backend-memfd,id=m,size=64M,share=on", &[]);
    let refused_by =
        |before: &[&str]| PagerProcess::start(&machine, before, "attach", "").refused();
    let refused = refused_by(&["setpriv", "--bounding-set", "-sys_ptrace", "--"]);
    assert!(refused.contains("no right to trace it"), "{refused}");
    let without = "mount -t tmpfs none /dev && exec \"$@\"";
    let refused = refused_by(&["unshare", "-m", "sh", "-c", without, "sh"]);
    assert!(refused.contains("no /dev/userfaultfd"), "{refused}");
    // Somebody who may use the records, but not the device.
    std::fs::remove_dir_all(machine.folder()).unwrap();
    let program = std::env::current_exe().unwrap();
    let is_readable = Command::new(other[0])
        .args(&other[1..])
        .args(["test", "-x"])
        .arg(&program)
        .status()
        .unwrap()
        .success();
    if is_readable {
        let refused = refused_by(&other);
        assert!(refused.contains("may not be opened"), "{refused}");
    } else {
        println!("Skipped: another user may not run this program");
    }
    machine.check();
}

pub fn memory_that_another_userfaultfd_has() {
    let mut machine = Machine::start();
    let mut pager = PagerProcess::start(&machine, &[], "attach", "");
    let guard = pager.attached().guard as i32;
    // A pager that is dead, and a guard that does not do its duty.
    // SAFETY: a signal to a process that this test has started.
    unsafe { libc::kill(guard, libc::SIGSTOP) };
    pager.kill();
    // One with records in another folder does not know of it.
    let folder = machine.folder.path().join("other");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["role-pager", &machine.process().to_string()]).arg(folder);
    let output = command.args(["-", "attach"]).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("another userfaultfd has its memory"), "{text}");
    assert_eq!(machine.registered(), 64 << 20, "a refusal leaves what others have registered");
    // SAFETY: as above.
    unsafe { libc::kill(guard, libc::SIGCONT) };
    until("release by the guard", || (machine.registered() == 0).then_some(()));
    machine.check();
}
