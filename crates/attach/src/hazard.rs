//! What makes it unsafe that pages of a VMM leave, or stay away, though a pager may be attached.
//!
//! A device that has the address of a page in the machine's memory goes on with that page when it
//! has left: what it writes then is lost. There is no test for such a page, so there must be no
//! such device. What is there at the start is refused; what appears later makes all pages come in.

use std::fs;
use std::path::Path;

use crate::memory::MappedMemory;
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
    if words.iter().any(|word| word.starts_with("virtio-mem")) {
        return Err(AttachRefusal::VirtioMem);
    }
    let has_kvm = files(vmm)?.iter().any(|file| file.link == "/dev/kvm");
    let is_on = |path: &&str| {
        let text = fs::read_to_string(Path::new(path)).unwrap_or_default();
        matches!(text.trim(), "Y" | "1")
    };
    if has_kvm && NESTED.iter().any(|path| is_on(&path)) && may_nest(&words) {
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
    let locked = refusal::locked_bytes(&vmm.status("VmLck").map_err(of_access)?);
    if locked > 0 {
        return Err(AttachRefusal::Locked(locked));
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

/// Whether one of these mappings of the VMM is that part of its guest's memory.
pub(crate) fn is_mapped(maps: &[ProcessMap], memory: &MappedMemory) -> bool {
    maps.iter().any(|map| {
        // The kernel may show neighbours as one mapping.
        let is_within = map.range.start <= memory.start && memory.end <= map.range.end;
        map.inode == memory.inode
            && is_within
            && map.offset + (memory.start - map.range.start) == memory.offset
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
        let map = |range, offset, inode| ProcessMap { range, offset, inode, ..Default::default() };
        assert!(is_mapped(&[map(0x5000..0x9000, 0x1000, 7)], &memory));
        assert!(is_mapped(&[map(0x4000..0xa000, 0, 7)], &memory));
        for other in [
            map(0x5000..0x9000, 0x1000, 8),
            map(0x5000..0x9000, 0x2000, 7),
            map(0x5000..0x8000, 0x1000, 7),
        ] {
            assert!(!is_mapped(&[other], &memory));
        }
    }
}
