//! Files: the path, the size and the file system of an inode.

use std::ops::Range;

use fathom_insight::{Facts, Name, Names};

use crate::kernel::Kernel;
use crate::paging::printable;
use crate::systems::{FileSystem, JournalSectors};

/// The most parts of a path.
const DEPTH_MAX: usize = 128;
/// The longest name of a directory entry, in bytes (`NAME_MAX`).
const NAME_MAX: usize = 255;
/// The longest path, in bytes.
const PATH_MAX: usize = 4096;
/// The number of files in a queue's cache; a power of two.
const FILES: usize = 2048;
/// The most file systems in a queue's cache.
const SYSTEMS_MAX: usize = 64;
/// The most mounted file systems that a search examines.
const SUPER_BLOCKS_MAX: usize = 1024;
/// The most names and super blocks examined for one request: a guest can make each page belong to
/// another file, each of them deeply nested.
const STEPS_MAX: u32 = 4096;
/// The age at which a cached entry is read again: a directory above the file may have been renamed.
const FRESH_NS: u64 = 1_000_000_000;

const TYPE_MASK: u64 = 0o17_0000;
const TYPE_DIRECTORY: u64 = 0o04_0000;
const TYPE_REGULAR: u64 = 0o10_0000;
const TYPE_LINK: u64 = 0o12_0000;
/// The flag of an inode of a directory that ignores case (`S_CASEFOLD`).
const FLAG_CASEFOLD: u64 = 1 << 15;
/// The flag of an inode whose content its file system encrypts (`S_ENCRYPTED`).
const FLAG_ENCRYPTED: u64 = 1 << 14;
/// The flag of a dentry that is not known to be connected to the root (`DCACHE_DISCONNECTED`).
const DISCONNECTED: u32 = 1 << 5;

/// The nature of the inode of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Nature {
    /// A file, or the target of a link.
    #[default]
    File,
    Directory,
    /// An inode for the file system's own structures.
    Internal,
    /// An inode with content of other files, which the file system moves. Whose it is, is unknown.
    Mover,
    /// A block device with a mounted file system: the page has structures of that file system.
    Mounted(Mounted),
    /// A block device without a mounted file system.
    Device,
}

/// A file system that is mounted from a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// The address of the file system's super block.
    pub super_block: u64,
    /// The row of the file system's type.
    pub row: &'static FileSystem,
}

/// The facts about an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inode {
    pub nature: Nature,
    /// The `block_device` that has the content, or that the inode represents; 0 if it is unknown.
    pub device: u64,
    /// All facts but the kind, the group and the process.
    pub facts: Facts,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    /// The inode's address; 0 marks an empty entry.
    address: u64,
    number: u64,
    generation: u32,
    super_block: u64,
    /// The inode's first dentry, and the fields of that dentry's name.
    dentry: u64,
    parent: u64,
    text: u64,
    /// The name's hash and length. They distinguish short names, which all lie in the dentry
    /// itself, at the same address.
    hash: u64,
    is_unlinked: bool,
    /// Of a block device: the address of its field for the holder, or 0.
    holder_place: u64,
    /// Of a block device: its holder, which changes at a mount and an unmount. Of a file: the block
    /// device of its file system.
    holder: u64,
    read_ns: u64,
    inode: Inode,
}

/// The fields of a super block.
#[derive(Clone, Copy)]
struct System {
    address: u64,
    /// The address of its type, and the beginning of the name of its device. They detect another
    /// file system that has been mounted at the same address.
    type_address: u64,
    device_text: u64,
    type_name: Name,
    device: Name,
    row: &'static FileSystem,
    block_device: u64,
    read_ns: u64,
}

/// A cache of files and file systems.
pub(crate) struct FileCache {
    entries: Box<[Entry]>,
    systems: Vec<System>,
    /// The number of steps left for the current request.
    steps: u32,
}

impl Default for FileCache {
    fn default() -> Self {
        let entries = vec![Entry::default(); FILES].into();
        Self { entries, systems: Vec::new(), steps: STEPS_MAX }
    }
}

impl FileCache {
    /// Begins a request: resets the number of steps.
    pub fn begin(&mut self) {
        self.steps = STEPS_MAX;
    }

    /// The facts about the inode at `address`.
    pub fn inode(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        address: u64,
        now_ns: u64,
    ) -> Option<Inode> {
        let layout = &kernel.layout;
        // Inodes are slab objects: in the direct map, and aligned.
        if address % 8 != 0 {
            return None;
        }
        let physical = kernel.space.direct(address)?;
        let window = kernel.memory.window(physical);
        let number = window.u64(layout.inode_number)?;
        let super_block = window.u64(layout.inode_sb)?;
        let size = window.u64(layout.inode_size)?;
        let generation = window.u32(layout.inode_generation)?;
        let first = window.u64(layout.inode_dentries)?;
        let place = (address >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let place = place as usize & (FILES - 1);
        let entry = &self.entries[place];
        let same = entry.address == address
            && entry.number == number
            && entry.super_block == super_block
            && entry.generation == generation
            && now_ns.saturating_sub(entry.read_ns) < FRESH_NS
            && first.wrapping_sub(if first == 0 { 0 } else { layout.dentry_alias }) == entry.dentry
            && is_same_name(kernel, entry)
            && match entry.holder_place {
                // Another file system may have been mounted at the super block's address.
                0 => kernel.u64(super_block.wrapping_add(layout.sb_device)),
                place => kernel.u64(place),
            } == Some(entry.holder);
        if same {
            let mut inode = entry.inode;
            if inode.nature == Nature::File || inode.nature == Nature::Directory {
                inode.facts.file_size = size;
            }
            return Some(inode);
        }
        let entry = self.read(kernel, names, address, now_ns)?;
        self.entries[place] = entry;
        Some(entry.inode)
    }

    fn read(&mut self, kernel: &Kernel, names: &Names, address: u64, now_ns: u64) -> Option<Entry> {
        let layout = &kernel.layout;
        step(&mut self.steps)?;
        let super_block = kernel.pointer(address + layout.inode_sb)?;
        let number = kernel.u64(address + layout.inode_number)?;
        let mode = u64::from(kernel.u32(address + layout.inode_mode)?) & TYPE_MASK;
        let mut entry = Entry {
            address,
            number,
            generation: kernel.u32(address + layout.inode_generation)?,
            super_block,
            read_ns: now_ns,
            ..Entry::default()
        };
        let device_super = kernel.places.device_super.and_then(|place| kernel.u64(place));
        if device_super == Some(super_block) {
            // The holder is read first: if it changes after that, the entry is detected as out of
            // date.
            if let Some(place) = layout.block_device_holder {
                if let Some(device) = device_of(kernel, address) {
                    entry.holder_place = device.wrapping_add(place);
                    entry.holder = kernel.u64(entry.holder_place)?;
                }
            }
            entry.inode = self.device(kernel, names, address, now_ns)?;
            return Some(entry);
        }
        let system = self.system(kernel, names, super_block, now_ns)?;
        let is_hidden = || Self::is_inaccessible(kernel, address);
        let internal = system.row.own.has(number, is_hidden)?;
        let is_mover = match system.row.is_mover {
            Some(is_mover) if !internal && mode == TYPE_REGULAR => is_mover(kernel, address)?,
            _ => false,
        };
        let nature = match mode {
            _ if internal => Nature::Internal,
            _ if is_mover => Nature::Mover,
            TYPE_REGULAR | TYPE_LINK => Nature::File,
            TYPE_DIRECTORY => Nature::Directory,
            _ => return None,
        };
        let mut facts =
            Facts { file_system: system.type_name, device: system.device, ..Facts::default() };
        if !matches!(nature, Nature::Internal | Nature::Mover) {
            facts.inode = number;
            facts.inode_address = address;
            facts.file_size = kernel.u64(address + layout.inode_size)?;
            facts.owner = kernel.u32(address + layout.inode_owner)?;
            if let Some(place) = layout.inode_flags {
                let flags = u64::from(kernel.u32(address + place)?);
                facts.is_transformed = flags & FLAG_ENCRYPTED != 0;
            }
            if let Some(place) = layout.inode_write_hint {
                facts.write_hint = (kernel.u32(address + place)? & 0xff) as u8;
            }
            let first = kernel.u64(address + layout.inode_dentries)?;
            if first != 0 {
                entry.dentry = first.wrapping_sub(layout.dentry_alias);
                entry.parent = kernel.u64(entry.dentry.wrapping_add(layout.dentry_parent))?;
                let name = entry.dentry.wrapping_add(layout.dentry_name);
                entry.text = kernel.u64(name.wrapping_add(layout.name_text))?;
                entry.hash = kernel.u64(name.wrapping_add(layout.name_hash))?;
                let chain = kernel.u64(entry.dentry.wrapping_add(layout.dentry_hash + 8))?;
                let is_unlinked = is_unlinked(kernel, &entry, chain);
                entry.is_unlinked = is_unlinked.unwrap_or(true);
                // The dentry points back to the inode, unless it is torn.
                let back =
                    layout.dentry_inode.and_then(|at| kernel.u64(entry.dentry.wrapping_add(at)));
                let is_own = layout.dentry_inode.is_none() || back == Some(address);
                if is_own && is_unlinked.is_some() {
                    let path = path(kernel, &entry, nature, &mut self.steps);
                    facts.path = path.map_or(Name::NONE, |path| names.number(&path));
                }
            }
        }
        entry.holder = system.block_device;
        entry.inode = Inode { nature, device: system.block_device, facts };
        Some(entry)
    }

    /// Whether a file system made an inode for itself. Such an inode cannot be opened: it has the
    /// operations with which every inode is created.
    fn is_inaccessible(kernel: &Kernel, address: u64) -> bool {
        let operations = || kernel.u64(address.wrapping_add(kernel.layout.inode_operations?));
        kernel.places.no_operations.is_some_and(|none| operations() == Some(none))
    }

    /// The super block of the file system that is mounted from a block device.
    pub fn super_block_of(&mut self, kernel: &Kernel, device: u64) -> Option<u64> {
        super_block_of(kernel, device, &mut self.steps).filter(|super_block| *super_block != 0)
    }

    /// The facts about a block device's inode, which stands for the structures of the file system
    /// on the device, or for the device itself. `None` if the list of file systems is torn.
    fn device(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        address: u64,
        now_ns: u64,
    ) -> Option<Inode> {
        let layout = &kernel.layout;
        let bdev = device_of(kernel, address);
        let mounted = match bdev {
            Some(bdev) => super_block_of(kernel, bdev, &mut self.steps)?,
            None => 0,
        };
        if mounted != 0 {
            let system = self.system(kernel, names, mounted, now_ns)?;
            let (file_system, device) = (system.type_name, system.device);
            return Some(Inode {
                nature: Nature::Mounted(Mounted { super_block: mounted, row: system.row }),
                device: bdev.unwrap_or(0),
                facts: Facts { file_system, device, ..Facts::default() },
            });
        }
        let device = bdev.and_then(|bdev| {
            let disk = kernel.pointer(bdev.wrapping_add(layout.block_device_disk?))?;
            if let Some(place) = layout.disk_device {
                // The whole disk's device points back to the disk.
                let whole = kernel.pointer(disk.wrapping_add(place))?;
                if kernel.u64(whole.wrapping_add(layout.block_device_disk?))? != disk {
                    return None;
                }
            }
            kernel.text(disk.wrapping_add(layout.disk_name), 32)
        });
        let device = device.map_or(Name::NONE, |name| names.number(&name));
        let facts = Facts { device, ..Facts::default() };
        Some(Inode { nature: Nature::Device, device: bdev.unwrap_or(0), facts })
    }

    fn system(
        &mut self,
        kernel: &Kernel,
        names: &Names,
        address: u64,
        now_ns: u64,
    ) -> Option<System> {
        let known = self.systems.iter().position(|system| system.address == address);
        if let Some(system) = known.map(|place| self.systems[place]) {
            let layout = &kernel.layout;
            let word = |place: u64| kernel.u64(address.wrapping_add(place));
            if now_ns.saturating_sub(system.read_ns) < FRESH_NS
                && word(layout.sb_type) == Some(system.type_address)
                && word(layout.sb_device) == Some(system.block_device)
                && word(layout.sb_name) == Some(system.device_text)
            {
                return Some(system);
            }
        }
        let system = read_system(kernel, names, address, now_ns)?;
        if let Some(place) = known {
            self.systems[place] = system;
        } else {
            if self.systems.len() == SYSTEMS_MAX {
                self.systems.clear();
            }
            self.systems.push(system);
        }
        Some(system)
    }
}

/// The `block_device` of the block device's inode at `address`.
fn device_of(kernel: &Kernel, address: u64) -> Option<u64> {
    let (inode, device) = kernel.layout.block_device_inode.zip(kernel.layout.block_device_of)?;
    Some(address.wrapping_sub(inode).wrapping_add(device))
}

/// Whether an inode's first name is unchanged since it was read.
#[inline]
fn is_same_name(kernel: &Kernel, entry: &Entry) -> bool {
    let layout = &kernel.layout;
    if entry.dentry == 0 {
        return true;
    }
    let dentry = kernel.object(entry.dentry);
    dentry.u64(layout.dentry_parent) == Some(entry.parent)
        && dentry.u64(layout.dentry_name.wrapping_add(layout.name_text)) == Some(entry.text)
        && dentry.u64(layout.dentry_name.wrapping_add(layout.name_hash)) == Some(entry.hash)
        && dentry.u64(layout.dentry_hash + 8).is_some_and(|chain| {
            if chain != 0 {
                return !entry.is_unlinked;
            }
            is_unlinked(kernel, entry, chain) == Some(entry.is_unlinked)
        })
}

/// Whether the name of an inode has been removed: its dentry is in no hash chain (`chain` is null).
/// In a folder that ignores case, the dentry of a new file is in none either, until the name is
/// looked up again. `None` if the folder is torn.
#[cold]
fn is_unlinked(kernel: &Kernel, entry: &Entry, chain: u64) -> Option<bool> {
    if chain != 0 {
        return Some(false);
    }
    let layout = &kernel.layout;
    let folder = kernel.pointer(entry.dentry.wrapping_add(layout.dentry_parent))?;
    let folder = kernel.pointer(folder.wrapping_add(layout.dentry_inode?))?;
    let mode = u64::from(kernel.u32(folder.wrapping_add(layout.inode_mode))?);
    let is_folder = folder % 8 == 0
        && mode & TYPE_MASK == TYPE_DIRECTORY
        && kernel.u64(folder.wrapping_add(layout.inode_sb))? == entry.super_block;
    if !is_folder {
        return None;
    }
    let flags = u64::from(kernel.u32(folder.wrapping_add(layout.inode_flags?))?);
    let links = kernel.u32(entry.address.wrapping_add(layout.inode_links?))?;
    Some(flags & FLAG_CASEFOLD == 0 || links == 0)
}

/// Whether a dentry without a parent is the root of a directory tree. A file that was opened by its
/// handle, as an NFS server does, may have such a dentry too: its place in the tree is not known.
fn is_root(kernel: &Kernel, dentry: u64, super_block: u64, is_directory: bool) -> bool {
    let layout = &kernel.layout;
    let root = layout.sb_root.and_then(|place| kernel.u64(super_block.wrapping_add(place)));
    if root == Some(dentry) {
        return true;
    }
    // The root of a snapshot of NILFS2 is not the file system's.
    let flags = layout.dentry_flags.and_then(|place| kernel.u32(dentry.wrapping_add(place)));
    is_directory && flags.is_some_and(|flags| flags & DISCONNECTED == 0)
}

fn read_system(kernel: &Kernel, names: &Names, address: u64, now_ns: u64) -> Option<System> {
    let layout = &kernel.layout;
    // All super blocks are in one list: the link of the next one points back.
    let own = address.wrapping_add(layout.sb_list);
    if kernel.u64(kernel.pointer(own)?.wrapping_add(8))? != own {
        return None;
    }
    let kind = kernel.pointer(address.wrapping_add(layout.sb_type))?;
    let text = kernel.pointer(kind.wrapping_add(layout.type_name))?;
    let name = kernel.text(text, 32)?;
    // Names of file systems are words. Any other text is torn.
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if name.len() < 2 || !name.bytes().all(is_letter) {
        return None;
    }
    let device = kernel.text(address.wrapping_add(layout.sb_name), 32)?;
    Some(System {
        address,
        type_address: kind,
        device_text: kernel.u64(address.wrapping_add(layout.sb_name))?,
        type_name: names.number(&name),
        device: names.number(&device),
        row: FileSystem::of(&name),
        block_device: kernel.u64(address.wrapping_add(layout.sb_device))?,
        read_ns: now_ns,
    })
}

impl Kernel {
    /// Whether a sector of a disk is in the journal of the file system with this super block, which
    /// is mounted from `device`, a block device of that disk.
    pub(crate) fn is_in_journal(&self, super_block: u64, device: u64, sector: u64) -> bool {
        let start = || self.u64(device.wrapping_add(self.layout.block_device_start?));
        journal_sectors(self, super_block)
            .zip(sector.checked_sub(start().unwrap_or(0)))
            .is_some_and(|(journal, sector)| journal.contains(&sector))
    }

    /// How the place of the journal of the file system with this super block is found. `None` if
    /// the type of the file system records no place.
    pub(crate) fn journal_place(&self, super_block: u64) -> Option<&'static JournalSectors> {
        self.system_of(super_block)?.journal_sectors.as_ref()
    }

    /// The row of the file system with this super block.
    pub(crate) fn system_of(&self, super_block: u64) -> Option<&'static FileSystem> {
        let layout = &self.layout;
        let kind = self.pointer(super_block.wrapping_add(layout.sb_type))?;
        let name = self.text(self.pointer(kind.wrapping_add(layout.type_name))?, 32)?;
        Some(FileSystem::of(&name))
    }

    /// Whether content on the `block_device` at `content` can be in a bio for the one at `device`;
    /// 0 is an unknown device. Content on a device that consists of other devices can be in a bio
    /// for any device.
    pub(crate) fn may_lie_on(&self, content: u64, device: u64) -> bool {
        let layout = &self.layout;
        let is_stacked = || {
            let at = |address: u64, place: u64| self.pointer(address.wrapping_add(place));
            let disk = at(content, layout.block_device_disk?)?;
            // The disk's device points back to the disk.
            let whole = at(disk, layout.disk_device?)?;
            let name = self.text(disk.wrapping_add(layout.disk_name), 32)?;
            let is_disk = at(whole, layout.block_device_disk?)? == disk;
            Some(is_disk && ["dm-", "md", "bcache"].iter().any(|layer| name.starts_with(layer)))
        };
        content == device || device == 0 || content != 0 && is_stacked() == Some(true)
    }
}

/// The sectors of a block device that contain the journal of the file system mounted from it,
/// counted from the start of the device. `None` if the file system has no journal, has it
/// elsewhere, or does not record its place.
fn journal_sectors(kernel: &Kernel, super_block: u64) -> Option<Range<u64>> {
    let journal = kernel.journal_place(super_block)?;
    let private = kernel.pointer(super_block.wrapping_add(kernel.layout.sb_private?))?;
    (journal.get)(kernel, super_block, private)
}

/// Counts a step; `None` when there were too many.
fn step(steps: &mut u32) -> Option<()> {
    *steps = steps.checked_sub(1)?;
    Some(())
}

/// The super block of the file system that is mounted from a block device; 0 if there is none.
/// `None` if the list is torn.
fn super_block_of(kernel: &Kernel, bdev: u64, steps: &mut u32) -> Option<u64> {
    let Some(head) = kernel.places.super_blocks else { return Some(0) };
    let layout = &kernel.layout;
    let (mut before, mut entry) = (head, kernel.pointer(head)?);
    for _ in 0..SUPER_BLOCKS_MAX {
        // Each link points back.
        if kernel.u64(entry.wrapping_add(8))? != before {
            return None;
        }
        if entry == head {
            return Some(0);
        }
        step(steps)?;
        let super_block = entry.wrapping_sub(layout.sb_list);
        if kernel.u64(super_block.wrapping_add(layout.sb_device))? == bdev {
            return Some(super_block);
        }
        (before, entry) = (entry, kernel.pointer(entry)?);
    }
    None
}

/// The path from a file system's root to the dentry of an entry, whose inode has this nature. The
/// path of an unlinked file ends with a space and `(deleted)`.
fn path(kernel: &Kernel, entry: &Entry, nature: Nature, steps: &mut u32) -> Option<String> {
    let layout = &kernel.layout;
    let mut dentry = entry.dentry;
    let mut parts: Vec<String> = Vec::new();
    let mut length = 0;
    loop {
        let parent = kernel.pointer(dentry.wrapping_add(layout.dentry_parent))?;
        step(steps)?;
        let name = name(kernel, dentry)?;
        if parent == dentry {
            let is_directory = nature == Nature::Directory || !parts.is_empty();
            match (name.as_str(), parts.is_empty()) {
                ("/", _) if !is_root(kernel, dentry, entry.super_block, is_directory) => {
                    return None;
                }
                ("/", true) => return Some("/".to_owned()),
                ("/", false) => break,
                // It is in no directory tree: memory that a process uses as a file.
                (_, true) => parts.push(name),
                (_, false) => return None,
            }
            break;
        }
        length += name.len() + 1;
        if length > PATH_MAX || parts.len() == DEPTH_MAX {
            return None;
        }
        parts.push(name);
        dentry = parent;
    }
    let mut path = String::with_capacity(length + 10);
    for part in parts.iter().rev() {
        path.push('/');
        path.push_str(part);
    }
    if entry.is_unlinked {
        path.push_str(" (deleted)");
    }
    Some(path)
}

/// The name of a dentry; `None` if it is torn.
fn name(kernel: &Kernel, dentry: u64) -> Option<String> {
    let layout = &kernel.layout;
    let name = dentry.wrapping_add(layout.dentry_name);
    let count = kernel.u32(name.wrapping_add(layout.name_length))? as usize;
    let text = kernel.pointer(name.wrapping_add(layout.name_text))?;
    if count == 0 || count > NAME_MAX {
        return None;
    }
    // A zero byte follows the name.
    let mut bytes = [0; NAME_MAX + 1];
    kernel.space.read(&kernel.memory, text, &mut bytes[..=count])?;
    let is_whole = !bytes[..count].contains(&0) && bytes[count] == 0;
    is_whole.then(|| printable(&bytes[..count]))
}
