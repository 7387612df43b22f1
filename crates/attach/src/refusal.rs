//! What a pager does not attach to, and why.
//!
//! Most of what is refused here could go wrong only when pages leave. It is refused from the
//! beginning: an operator finds out with the first step, not with the last.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use fathom_failure::Failing;

use crate::daemon::{self, DaemonProcess, Examined};
use crate::vmm::{ProcessFile, ProcessMap, Vmm};

/// Descriptors by which a device reads and writes memory without a fault, and what they are.
const PINNING: &[(&str, &str)] = &[
    ("/dev/vfio/", "VFIO"),
    ("anon_inode:[vfio", "VFIO"),
    ("/dev/iommu", "iommufd"),
    ("anon_inode:[iommufd", "iommufd"),
    ("/dev/vhost-vdpa", "vhost-vdpa"),
    ("/dev/udmabuf", "udmabuf"),
    ("/dmabuf:", "udmabuf"),
    ("/dev/infiniband/", "RDMA"),
    ("/dev/vhost-scsi", "vhost-scsi"),
    ("/dev/sg", "SCSI generic"),
    ("/dev/bsg/", "SCSI generic"),
    ("/dev/ng", "NVMe generic"),
];
/// Descriptors of guests whose memory the host cannot read.
const CONFIDENTIAL: &[&str] = &["/dev/sev", "/dev/tdx", "anon_inode:[kvm-gmem]"];
/// Words of a command line of such guests.
const CONFIDENTIAL_OPTIONS: &[&str] = &["confidential-guest-support=", "memory-encryption="];
/// Where the kernel says whether files in memory get huge pages.
const HUGE_PAGE_SETTINGS: &str = "/sys/kernel/mm/transparent_hugepage";

/// Why a VMM is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachRefusal {
    /// It maps no file that it shares.
    NotShared,
    /// Its shared file, named here, is on a disk.
    NotInMemory(String),
    /// Its memory, named here, is or may become huge pages.
    HugePages(String),
    /// A device, named here, has its memory pinned.
    Pinned(&'static str),
    /// A process that is not registered maps its memory: its number and name.
    Holder(i32, String),
    /// A `fathom` maps its memory, with this number and user, whose program others than root could
    /// change.
    Untrusted(i32, u32),
    /// Not all processes could be examined for that.
    HoldersUnknown,
    /// So many bytes of it are locked.
    Locked(u64),
    /// The host cannot read the guest's memory.
    Confidential,
    /// The kernel has no `/dev/userfaultfd`.
    NoUserFault,
    /// It has, but this user may not open it.
    UserFaultForbidden,
    /// Another process, with this number, traces it.
    Traced(i32),
    /// This user may not trace it.
    Forbidden,
    /// Its calls cannot be redirected: the processor checks where functions return to.
    ShadowStack,
    /// Another userfaultfd has its memory: QEMU's own, or that of a pager that nobody knows.
    Registered,
    /// It reads its file, named here, past the kernel's cache into its guest's memory.
    DirectIo(String),
    /// It has memory of virtio-mem, which its guest may expect to be zeroes after it was given
    /// back.
    VirtioMem,
    /// Its guest may run guests.
    Nested,
    /// Its children have its guest's memory, named here.
    Inherited(String),
    /// The process has ended.
    Ended,
}

impl AttachRefusal {
    /// What an error of `/proc` means.
    pub(crate) fn of_access(_: &Vmm, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::PermissionDenied => Self::Forbidden,
            _ => Self::Ended,
        }
    }
}

impl fmt::Display for AttachRefusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotShared => out.write_str("its guest's memory is not shared"),
            Self::NotInMemory(path) => {
                write!(out, "its guest's memory is the file {}, not a file in memory", clean(path))
            }
            Self::HugePages(path) => {
                write!(out, "its guest's memory ({}) is in huge pages, or may be", clean(path))
            }
            Self::Pinned(kind) => write!(out, "it has devices that pin its memory ({kind})"),
            Self::Holder(process, name) => {
                write!(out, "process {process} ({}) also maps its guest's memory", clean(name))
            }
            Self::Untrusted(process, user) => write!(
                out,
                "process {process} also maps its guest's memory: a fathom of user {user}, whose \
                 program does not belong to root alone"
            ),
            Self::HoldersUnknown => {
                out.write_str("not all processes could be examined for who else maps its memory")
            }
            Self::Locked(bytes) => write!(out, "{bytes} bytes of its memory are locked"),
            Self::Confidential => out.write_str("its guest is confidential"),
            Self::NoUserFault => out.write_str("this kernel has no /dev/userfaultfd"),
            Self::UserFaultForbidden => out.write_str("/dev/userfaultfd may not be opened"),
            Self::Traced(by) => write!(out, "process {by} traces it already"),
            Self::Forbidden => out.write_str("this user has no right to trace it"),
            Self::ShadowStack => out.write_str("it has a shadow stack"),
            Self::Registered => {
                out.write_str("another userfaultfd has its memory, which no record here mentions")
            }
            Self::DirectIo(path) => {
                write!(out, "its device reads {} directly into its guest's memory", clean(path))
            }
            Self::VirtioMem => out.write_str("it has memory of virtio-mem"),
            Self::Nested => out.write_str("its guest may run guests of its own"),
            Self::Inherited(path) => {
                write!(out, "its children would have its guest's memory ({})", clean(path))
            }
            Self::Ended => out.write_str("it has ended"),
        }
    }
}

/// Names of others in a message.
fn clean(name: &str) -> String {
    fathom_failure::text::foreign(name)
}

impl std::error::Error for AttachRefusal {}

impl Failing for AttachRefusal {
    fn remedy(&self) -> String {
        match self {
            Self::NotShared | Self::NotInMemory(_) => {
                "start it with -object memory-backend-memfd,id=memory,size=SIZE,share=on and \
                 -machine memory-backend=memory"
            }
            Self::HugePages(_) => {
                "start it without huge pages (hugetlb=off), and with `never` in \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            }
            Self::Pinned(_) => "start it without such devices, or leave its memory as it is",
            Self::Holder(..) => {
                "end that process, or take its device from the machine; only `fathom` itself may \
                 share the memory"
            }
            Self::Untrusted(..) => {
                "attach as root, and install the daemon's program as a file of root that nobody \
                 else may write, as the package does; or run both as the same user"
            }
            Self::HoldersUnknown => "attach as root, in the host's own namespace of processes",
            Self::Locked(_) => "start it without -overcommit mem-lock=on",
            Self::Confidential => "leave its memory as it is",
            Self::NoUserFault => "boot a kernel from Linux 6.1 with CONFIG_USERFAULTFD",
            Self::UserFaultForbidden => {
                "attach as root, or give this user the right: setfacl -m u:USER:rw /dev/userfaultfd"
            }
            Self::Traced(_) => "end the debugger first",
            Self::Forbidden => {
                "attach as root, or as the user of the VMM if the kernel lets it trace its own \
                 processes (kernel.yama.ptrace_scope)"
            }
            Self::ShadowStack => "start it without shadow stacks (GLIBC_TUNABLES)",
            Self::Registered => {
                "end what has it: a migration in mode postcopy, a background snapshot, or a pager \
                 that keeps its records in another folder (--folder)"
            }
            Self::DirectIo(_) => {
                "start it with cache.direct=off (cache=writeback) for that disk, or serve the disk \
                 with fathom"
            }
            Self::VirtioMem => "start it without virtio-mem, or leave out --limit",
            Self::Nested => {
                "start it without nested virtualisation (-cpu host,-vmx or -cpu host,-svm), or leave \
                 out --limit"
            }
            Self::Inherited(_) => "use QEMU, which excludes it (MADV_DONTFORK), or leave out --limit",
            Self::Ended => "",
        }
        .to_owned()
    }
}

/// Whether the VMM itself can be traced.
pub(crate) fn check_process(vmm: &Vmm) -> Result<(), AttachRefusal> {
    let status = |name| vmm.status(name).map_err(|error| AttachRefusal::of_access(vmm, &error));
    match status("TracerPid")?.parse() {
        Ok(0) | Err(_) => {}
        Ok(by) => return Err(AttachRefusal::Traced(by)),
    }
    if status("x86_Thread_features")?.split_whitespace().any(|feature| feature == "shstk") {
        return Err(AttachRefusal::ShadowStack);
    }
    let locked = locked_bytes(&status("VmLck")?);
    if locked > 0 {
        return Err(AttachRefusal::Locked(locked));
    }
    let files = vmm.files().map_err(|error| AttachRefusal::of_access(vmm, &error))?;
    let command = vmm.text("cmdline").map_err(|error| AttachRefusal::of_access(vmm, &error))?;
    check_files(&files)?;
    if CONFIDENTIAL_OPTIONS.iter().any(|option| command.contains(option)) {
        return Err(AttachRefusal::Confidential);
    }
    Ok(())
}

pub(crate) fn locked_bytes(line: &str) -> u64 {
    let kib = line.split_whitespace().next().and_then(|word| word.parse().ok());
    kib.unwrap_or(0_u64).saturating_mul(1024)
}

pub(crate) fn check_files(files: &[ProcessFile]) -> Result<(), AttachRefusal> {
    for file in files {
        if let Some((_, kind)) = PINNING.iter().find(|(link, _)| file.link.starts_with(link)) {
            return Err(AttachRefusal::Pinned(kind));
        }
        if CONFIDENTIAL.iter().any(|link| file.link.starts_with(link)) {
            return Err(AttachRefusal::Confidential);
        }
    }
    Ok(())
}

/// Whether the guest's memory consists of single pages, and stays so.
pub(crate) fn check_pages(vmm: &Vmm, memory: &[ProcessMap]) -> Result<(), AttachRefusal> {
    let settings = HugePageSettings::read(Path::new(HUGE_PAGE_SETTINGS));
    let mounts = vmm.text("mountinfo").unwrap_or_default();
    for map in memory {
        let is_advised = map.flags.iter().any(|flag| flag == "hg");
        let is_refused = map.huge_bytes > 0
            || settings.may_be_huge(is_advised)
            || is_mounted_with_huge_pages(&mounts, &map.device, is_advised);
        if is_refused {
            return Err(AttachRefusal::HugePages(map.path.clone()));
        }
    }
    Ok(())
}

/// What the kernel is set to do with files in memory: the words in force, of each size.
#[derive(Debug, Default)]
struct HugePageSettings {
    all: String,
    sizes: Vec<String>,
}

impl HugePageSettings {
    fn read(folder: &Path) -> Self {
        let chosen = |path: &Path| {
            let text = fs::read_to_string(path.join("shmem_enabled")).unwrap_or_default();
            let word = text.split(['[', ']']).nth(1);
            word.unwrap_or_default().to_owned()
        };
        let sizes = fs::read_dir(folder).into_iter().flatten().flatten();
        let is_size = |path: &Path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("hugepages-"))
        };
        let sizes = sizes.map(|entry| entry.path()).filter(|path| is_size(path));
        Self { all: chosen(folder), sizes: sizes.map(|path| chosen(&path)).collect() }
    }

    fn may_be_huge(&self, is_advised: bool) -> bool {
        let is_on = |word: &str| match word {
            "always" | "within_size" | "force" => true,
            "advise" => is_advised,
            _ => false,
        };
        is_on(&self.all) || self.sizes.iter().any(|word| is_on(word))
    }
}

/// Whether the file system with this device was mounted with huge pages. A memfd's is not mounted.
fn is_mounted_with_huge_pages(mounts: &str, device: &str, is_advised: bool) -> bool {
    let Some((major, minor)) = device.split_once(':') else { return false };
    let number = |word| u32::from_str_radix(word, 16).unwrap_or(u32::MAX);
    let wanted = format!("{}:{}", number(major), number(minor));
    let of_it = mounts.lines().filter(|line| line.split(' ').nth(2) == Some(&wanted));
    let mut options = of_it.flat_map(|line| line.rsplit(' ').next().unwrap_or("").split(','));
    options.any(|option| match option {
        "huge=always" | "huge=within_size" => true,
        "huge=advise" => is_advised,
        _ => false,
    })
}

/// The processes of the daemon that map the guest's memory. An error if another one does, but for
/// the VMM and this process. It holds for this instant only.
pub(crate) fn find_daemons(
    vmm: &Vmm,
    memory: &[ProcessMap],
) -> Result<Vec<DaemonProcess>, AttachRefusal> {
    let mut daemons = Vec::new();
    let entries = fs::read_dir("/proc").map_err(|_| AttachRefusal::HoldersUnknown)?;
    for entry in entries.flatten() {
        let process = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        let Some(process) = process else { continue };
        if process == vmm.process() || process == std::process::id() as i32 {
            continue;
        }
        let maps = match Vmm::mappings_of(process) {
            Ok(maps) => maps,
            // The first process of a container may be beyond its root's reach. It only starts
            // others.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && process != 1 => {
                return Err(AttachRefusal::HoldersUnknown);
            }
            // It has ended.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(libc::ESRCH)
                    || error.kind() == io::ErrorKind::PermissionDenied =>
            {
                continue;
            }
            Err(_) => return Err(AttachRefusal::HoldersUnknown),
        };
        let has = |map: &ProcessMap| memory.iter().any(|own| own.is_of_file(map));
        if !maps.iter().any(has) {
            continue;
        }
        match daemon::examine(process) {
            Examined::Daemon(found) => daemons.push(found),
            // It has ended meanwhile, or has let go.
            _ if !Vmm::mappings_of(process).is_ok_and(|maps| maps.iter().any(has)) => {}
            Examined::Untrusted(user) => return Err(AttachRefusal::Untrusted(process, user)),
            Examined::Other => {
                let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
                return Err(AttachRefusal::Holder(process, name.trim().to_owned()));
            }
        }
    }
    Ok(daemons)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(link: &str) -> ProcessFile {
        ProcessFile { number: 3, link: link.to_owned() }
    }

    #[test]
    fn devices_that_pin_memory_are_refused_by_their_descriptors() {
        // None of these devices is on the machine of the tests.
        for (link, kind) in [
            ("/dev/vfio/12", "VFIO"),
            ("anon_inode:[vfio-device]", "VFIO"),
            ("/dev/iommu", "iommufd"),
            ("/dev/vhost-vdpa-0", "vhost-vdpa"),
            ("/dev/udmabuf", "udmabuf"),
            ("/dev/infiniband/uverbs0", "RDMA"),
        ] {
            assert_eq!(
                check_files(&[file("/dev/kvm"), file(link)]),
                Err(AttachRefusal::Pinned(kind))
            );
        }
        for link in ["/dev/sev", "anon_inode:[kvm-gmem]"] {
            assert_eq!(check_files(&[file(link)]), Err(AttachRefusal::Confidential), "{link}");
        }
        let usual = ["/dev/kvm", "/dev/vhost-net", "anon_inode:kvm-vm", "/memfd:memory (deleted)"];
        assert_eq!(check_files(&usual.map(file)), Ok(()));
    }

    #[test]
    fn huge_pages_are_what_the_settings_in_force_allow() {
        let folder = tempfile::tempdir().unwrap();
        let set = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("shmem_enabled"), text).unwrap();
        };
        let read = || HugePageSettings::read(folder.path());
        set(".", "always within_size advise [never] deny force\n");
        set("hugepages-64kB", "always inherit within_size advise [never]\n");
        assert!(!read().may_be_huge(true));
        set("hugepages-64kB", "always [inherit] within_size advise never\n");
        assert!(!read().may_be_huge(true));
        set("hugepages-64kB", "always inherit within_size [advise] never\n");
        assert!(read().may_be_huge(true) && !read().may_be_huge(false));
        set("hugepages-64kB", "[always] inherit within_size advise never\n");
        assert!(read().may_be_huge(false));
        set("hugepages-64kB", "always inherit within_size advise [never]\n");
        set(".", "always within_size advise never deny [force]\n");
        assert!(read().may_be_huge(false));
    }

    #[test]
    fn a_mount_with_huge_pages_is_found_by_its_device() {
        let mounts = "36 35 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=9k\n\
                      37 35 0:27 / /big rw - tmpfs none rw,huge=always\n\
                      38 35 0:28 / /asked rw - tmpfs none rw,huge=advise\n";
        assert!(!is_mounted_with_huge_pages(mounts, "00:1a", true));
        assert!(is_mounted_with_huge_pages(mounts, "00:1b", false));
        assert!(is_mounted_with_huge_pages(mounts, "00:1c", true));
        assert!(!is_mounted_with_huge_pages(mounts, "00:1c", false));
        assert!(!is_mounted_with_huge_pages(mounts, "00:01", true));
    }

    #[test]
    fn locked_memory_is_counted_in_bytes() {
        assert_eq!(locked_bytes("  128 kB"), 131_072);
        assert_eq!(locked_bytes("0 kB"), 0);
        assert_eq!(locked_bytes(""), 0);
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        let all = [
            AttachRefusal::NotShared,
            AttachRefusal::NotInMemory("/x".into()),
            AttachRefusal::HugePages("/x".into()),
            AttachRefusal::Pinned("VFIO"),
            AttachRefusal::Holder(1, "x\n".into()),
            AttachRefusal::HoldersUnknown,
            AttachRefusal::Locked(1),
            AttachRefusal::Confidential,
            AttachRefusal::NoUserFault,
            AttachRefusal::UserFaultForbidden,
            AttachRefusal::Traced(1),
            AttachRefusal::Forbidden,
            AttachRefusal::ShadowStack,
            AttachRefusal::Registered,
            AttachRefusal::DirectIo("/x".into()),
            AttachRefusal::VirtioMem,
            AttachRefusal::Nested,
            AttachRefusal::Inherited("/x".into()),
        ];
        for refusal in all {
            assert!(!refusal.remedy().is_empty(), "{refusal}");
            assert!(!refusal.to_string().contains('\n'), "{refusal}");
        }
    }
}
