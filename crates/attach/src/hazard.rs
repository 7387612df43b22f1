//! What makes it unsafe that pages of a VMM leave, or stay away, though a pager may be attached.
//!
//! A device that has the address of a page in the machine's memory goes on with that page when it
//! has left: what it writes then is lost. There is no test for such a page, so there must be no
//! such device. What is there at the start is refused; what appears later makes all pages come in.

use std::fs;

use crate::memory::{self, MappedMemory};
use crate::refusal::{self, AttachRefusal};
use crate::vmm::{ProcessFile, ProcessMap, Vmm};

/// `O_DIRECT` of x86.
const DIRECT: u32 = 0o40_000;
/// Where the kernel says whether guests may run guests.
const NESTED: [&str; 2] =
    ["/sys/module/kvm_intel/parameters/nested", "/sys/module/kvm_amd/parameters/nested"];

/// Whether pages of a VMM may leave, as far as its command line says.
///
/// # Errors
/// Why not.
pub(crate) fn check_command(vmm: &Vmm) -> Result<(), AttachRefusal> {
    let command = vmm.text("cmdline").map_err(|error| AttachRefusal::of_access(vmm, &error))?;
    let words: Vec<&str> = command.split('\0').collect();
    if has_device(&words, "virtio-mem") {
        return Err(AttachRefusal::VirtioMem);
    }
    if has_device(&words, "scsi-generic") || has_device(&words, "scsi-block") {
        return Err(AttachRefusal::Pinned("SCSI generic"));
    }
    let has_kvm = files(vmm)?.iter().any(|file| file.link == "/dev/kvm");
    let is_on = |path: &str| {
        let text = fs::read_to_string(path).unwrap_or_default();
        matches!(text.trim(), "Y" | "1")
    };
    if has_kvm && NESTED.iter().any(|path| is_on(path)) && may_nest(&words) {
        return Err(AttachRefusal::Nested);
    }
    Ok(())
}

/// Whether a child of the VMM would have its guest's memory: what it touches of a page that is away
/// would become zeroes.
///
/// # Errors
/// That it would.
pub(crate) fn check_mappings(memory: &[ProcessMap]) -> Result<(), AttachRefusal> {
    let is_inherited = |map: &&ProcessMap| !map.flags.iter().any(|flag| flag == "dc");
    match memory.iter().find(is_inherited) {
        Some(map) => Err(AttachRefusal::Inherited(map.path.clone())),
        None => Ok(()),
    }
}

/// Whether a command line has a device of a kind, as words or as JSON.
fn has_device(words: &[&str], kind: &str) -> bool {
    let is_device = |pair: &[&str]| matches!(pair[0], "-device" | "--device");
    words.windows(2).any(|pair| is_device(pair) && pair[1].contains(kind))
}

/// Whether the processor of a command line may have extensions for guests.
fn may_nest(words: &[&str]) -> bool {
    let Some(at) = words.iter().position(|word| matches!(*word, "-cpu" | "--cpu")) else {
        return false;
    };
    let mut parts = words.get(at + 1).unwrap_or(&"").split(',');
    let mut may = matches!(parts.next(), Some("host" | "max"));
    for part in parts {
        match part {
            "vmx" | "svm" | "+vmx" | "+svm" | "vmx=on" | "svm=on" => may = true,
            "-vmx" | "-svm" | "vmx=off" | "svm=off" => may = false,
            _ => {}
        }
    }
    may
}

/// Whether anything that the VMM has open now accesses memory without a fault.
///
/// # Errors
/// What it is.
pub(crate) fn check_now(vmm: &Vmm) -> Result<(), AttachRefusal> {
    let of_access = |error| AttachRefusal::of_access(vmm, &error);
    let found = files(vmm)?;
    refusal::check_files(&found)?;
    for name in ["VmLck", "VmPin"] {
        let locked = refusal::locked_bytes(&vmm.status(name).map_err(of_access)?);
        if locked > 0 {
            return Err(AttachRefusal::Locked(locked));
        }
    }
    for ProcessFile { number, link } in found {
        // Sockets and files in memory are never read directly.
        if !link.starts_with('/') || link.starts_with("/memfd:") || link.starts_with("/dev/shm/") {
            continue;
        }
        // It was closed meanwhile.
        let Ok(text) = vmm.text(&format!("fdinfo/{number}")) else { continue };
        if is_direct(&text) {
            return Err(AttachRefusal::DirectIo(link));
        }
    }
    Ok(())
}

fn files(vmm: &Vmm) -> Result<Vec<ProcessFile>, AttachRefusal> {
    vmm.files().map_err(|error| AttachRefusal::of_access(vmm, &error))
}

/// Whether the account of a descriptor says that it is read directly.
fn is_direct(text: &str) -> bool {
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & DIRECT != 0)
}

/// Whether one of these mappings of the VMM is of that part of its guest's memory, or of a piece of
/// it.
pub(crate) fn is_mapped(maps: &[ProcessMap], memory: &MappedMemory) -> bool {
    let device = |map: &ProcessMap| memory::device_number(&map.device);
    maps.iter().any(|map| {
        let overlaps = map.range.start < memory.end && memory.start < map.range.end;
        overlaps && map.inode == memory.inode && device(map) == memory.device
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    #[test]
    fn a_processor_with_extensions_for_guests_is_found() {
        let nests = |line: &str| may_nest(&line.split(' ').collect::<Vec<_>>());
        for line in ["-cpu host", "-m 4G -cpu max,migratable=off", "-cpu Skylake-Server,vmx=on"] {
            assert!(nests(line), "{line}");
        }
        for line in ["-m 4G", "-cpu host,-vmx", "-cpu EPYC", "-cpu max,svm=off", "-cpu"] {
            assert!(!nests(line), "{line}");
        }
    }

    #[test]
    fn devices_are_found_in_both_forms() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let has = |line: &str| {
            let words = words(line);
            has_device(&words.iter().map(String::as_str).collect::<Vec<_>>(), "virtio-mem")
        };
        assert!(has("-m 4G -device virtio-mem-pci,id=a"));
        assert!(has("-device {\"driver\":\"virtio-mem-pci\",\"id\":\"a\"}"));
        assert!(!has("-name virtio-mem -device virtio-blk-pci"));
    }

    #[test]
    fn a_file_that_is_read_directly_is_found() {
        assert!(is_direct("pos:\t0\nflags:\t0140002\nmnt_id:\t29\n"));
        assert!(!is_direct("pos:\t0\nflags:\t0100002\nmnt_id:\t29\n") && !is_direct(""));
        let own = Vmm::open(std::process::id() as i32).unwrap();
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = file.path();
        let flags = libc::O_DIRECT;
        let Ok(direct) = fs::File::options().read(true).custom_flags(flags).open(path) else {
            println!("Skipped: no direct I/O here");
            return;
        };
        let found = check_now(&own).unwrap_err();
        assert!(matches!(&found, AttachRefusal::DirectIo(_)), "{found}");
        drop(direct);
    }

    #[test]
    fn memory_that_was_unplugged_is_not_mapped() {
        let memory =
            MappedMemory { start: 0x5000, end: 0x9000, offset: 0x1000, inode: 7, device: 1 };
        let map = |range, inode, device: &str| {
            let device = device.to_owned();
            ProcessMap { range, device, inode, ..Default::default() }
        };
        assert!(is_mapped(&[map(0x5000..0x9000, 7, "00:01")], &memory));
        assert!(is_mapped(&[map(0x4000..0xa000, 7, "00:01")], &memory));
        assert!(is_mapped(&[map(0x8000..0x9000, 7, "00:01")], &memory), "a piece is left");
        for other in [
            map(0x5000..0x9000, 8, "00:01"),
            map(0x5000..0x9000, 7, "00:02"),
            map(0x9000..0xa000, 7, "00:01"),
        ] {
            assert!(!is_mapped(&[other], &memory));
        }
    }
}
