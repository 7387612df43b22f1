//! The kernel, QEMU and the limits.
use std::{fs, process::Command};

use fathom_control::Bytes;
use rustix::process::{Resource, geteuid, getrlimit};

use super::Finding;
use crate::{
    failure::reason,
    load::SharedMemory,
    vm::{
        accelerator::{self, Kvm},
        qemu::{Qemu, VERSION_MIN},
    },
};

/// The oldest kernel with all features of `io_uring` that the reactor uses.
const KERNEL_MIN: (u32, u32) = (6, 1);
/// The open files that a daemon with some dozens of disks and queues needs.
const FILES_MIN: u64 = 4096;
/// The memory that `io_uring` may lock on kernels that count it, in bytes.
const LOCKED_MIN: u64 = 8 << 20;

/// Findings about the host as a whole.
pub fn findings() -> Vec<Finding> {
    let mut findings = vec![kernel(), io_uring(), memory()];
    findings.push(huge_pages());
    findings.extend(qemu());
    findings.push(qemu_img());
    findings.extend(limits());
    findings
}

fn kernel() -> Finding {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => (0, 0),
    };
    if version >= KERNEL_MIN {
        return Finding::ok("kernel", format!("Linux {release}"));
    }
    let remedy = "upgrade it; Linux 6.1 is the oldest that Fathom is tested with";
    Finding::warn("kernel", format!("Linux {release} is old"), remedy)
}

fn io_uring() -> Finding {
    let Err(error) = io_uring::IoUring::new(4) else {
        return Finding::ok("io_uring", "works");
    };
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    match (error.raw_os_error(), disabled.trim()) {
        (Some(libc::EPERM), "1" | "2") => Finding::fail(
            "io_uring",
            format!("forbidden: kernel.io_uring_disabled is {}", disabled.trim()),
            "sysctl kernel.io_uring_disabled=0, and the same in /etc/sysctl.d to keep it",
        ),
        (Some(libc::EPERM), _) => Finding::fail(
            "io_uring",
            "forbidden, possibly by a container's seccomp profile",
            "allow io_uring_setup, io_uring_enter and io_uring_register in that profile",
        ),
        (Some(libc::ENOSYS), _) => Finding::fail(
            "io_uring",
            "the kernel does not have it",
            "use a kernel with CONFIG_IO_URING",
        ),
        (Some(libc::ENOMEM), _) => Finding::fail(
            "io_uring",
            "the limit of locked memory is too low",
            "raise it: `ulimit -l unlimited`, or LimitMEMLOCK= in the systemd unit",
        ),
        _ => Finding::fail("io_uring", reason(&error), ""),
    }
}

/// vhost-user needs memory that is shared by file descriptor.
fn memory() -> Finding {
    match SharedMemory::new(1 << 16) {
        Ok(_) => Finding::ok("guest memory", "can be shared (memfd)"),
        Err(error) => Finding::fail(
            "guest memory",
            format!("cannot be shared: {}", reason(&error)),
            "use a kernel with CONFIG_MEMFD_CREATE; guests' disks need it",
        ),
    }
}

fn huge_pages() -> Finding {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
    };
    let (total, free) = (value("HugePages_Total"), value("HugePages_Free"));
    let size = Bytes(value("Hugepagesize").unwrap_or(0) << 10);
    let text = match (total, free) {
        (Some(total @ 1..), Some(free)) => format!("{free} of {total} free, {size} each"),
        _ => "none reserved; not required".to_owned(),
    };
    Finding::ok("huge pages", text)
}

fn qemu() -> Vec<Finding> {
    let qemu = match Qemu::find(None) {
        Ok(qemu) => qemu,
        Err(failure) => {
            return vec![Finding::warn(
                "QEMU",
                failure.to_string(),
                "needed for `fathom vm` on this host: apt install qemu-system-x86",
            )];
        }
    };
    let version = if qemu.version < VERSION_MIN {
        let remedy = "QEMU 7.2 is the oldest that Fathom is tested with";
        Finding::warn("QEMU", format!("{} is too old", qemu.version_text), remedy)
    } else {
        Finding::ok("QEMU", qemu.version_text.clone())
    };
    let kvm = match accelerator::kvm(&qemu) {
        Kvm::Works => Finding::ok("KVM", "a guest ran"),
        Kvm::Fails(reason) => Finding::warn(
            "KVM",
            reason,
            "guests run emulated, slowly; use a host with VT-x or SVM, or turn on nested \
             virtualisation",
        ),
    };
    vec![version, kvm]
}

fn qemu_img() -> Finding {
    let found = Command::new("qemu-img").arg("--version").output();
    let Ok(output) = found else {
        return Finding::warn(
            "qemu-img",
            "not installed",
            "needed for `fathom disk import`: apt install qemu-utils",
        );
    };
    let text = String::from_utf8_lossy(&output.stdout);
    Finding::ok("qemu-img", text.lines().next().unwrap_or_default())
}

fn limits() -> [Finding; 2] {
    // `None` is no limit.
    let files = getrlimit(Resource::Nofile);
    let files = match (files.current.unwrap_or(u64::MAX), files.maximum) {
        (soft, Some(hard)) if soft < FILES_MIN && hard < FILES_MIN => Finding::warn(
            "open files",
            format!("at most {hard}"),
            "enough for a few disks; for more, set LimitNOFILE=65536 in the systemd unit",
        ),
        (_, None) => Finding::ok("open files", "no limit"),
        (soft, Some(hard)) => Finding::ok("open files", format!("{soft}, can be raised to {hard}")),
    };
    let locked = match getrlimit(Resource::Memlock).current {
        Some(soft) if soft < LOCKED_MIN && !geteuid().is_root() => Finding::warn(
            "locked memory",
            format!("at most {}", Bytes(soft)),
            "some kernels count io_uring's buffers: `ulimit -l`, or LimitMEMLOCK= in the unit",
        ),
        Some(soft) => Finding::ok("locked memory", format!("at most {}", Bytes(soft))),
        None => Finding::ok("locked memory", "no limit"),
    };
    [files, locked]
}
