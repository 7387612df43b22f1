//! A queue checks a cached file, group or page at each use. All changes here happen within a
//! moment, in which no cached entry expires.

use fathom_insight::{ClassTable, Insight, Kind};

use super::SyntheticGuest;
use crate::resolver::{RequestView, Resolver};
use crate::synthetic::NamedFacts;

/// A queue of a guest, at one time.
struct Queue {
    guest: SyntheticGuest,
    resolver: Resolver,
}

impl Queue {
    fn new() -> Self {
        let guest = SyntheticGuest::roomy();
        let resolver = guest.guest().resolver();
        Self { guest, resolver }
    }

    /// Whether the bytes of a request are not those of their file.
    fn is_transformed(&mut self, name: &str) -> bool {
        let request = self.guest.linux.request(name);
        let mut insight = Insight::default();
        let pieces = request.pieces.iter().copied();
        self.resolver.resolve(&request.view, pieces, &ClassTable::default(), &mut insight);
        insight.facts.is_transformed
    }

    fn reported(&mut self, name: &str) -> NamedFacts {
        let request = self.guest.linux.request(name);
        let view = RequestView { now_ns: 5_000_000_000, ..request.view };
        let mut insight = Insight::default();
        let pieces = request.pieces.iter().copied();
        self.resolver.resolve(&view, pieces, &ClassTable::default(), &mut insight);
        NamedFacts::all(view.length, &insight, &self.guest.names).remove(0)
    }

    fn get(&self, address: u64) -> u64 {
        self.resolver.guest().kernel().unwrap().u64(address).unwrap()
    }

    fn set(&self, address: u64, value: u64) {
        self.guest.store.write_u64(address - self.guest.linux.shape.direct, value);
    }
}

#[test]
fn all_changes_are_detected_immediately() {
    let mut queue = Queue::new();
    let kernel = queue.resolver.guest().kernel().unwrap();
    let layout = &kernel.layout;
    let bio = |name: &str| {
        let request = queue.guest.linux.request(name).view.header - layout.request_size;
        kernel.memory.u64(request + layout.request_bio).unwrap()
    };
    let page = |name: &str| kernel.page_of(queue.guest.linux.request(name).pieces[0].0);
    let physical = |page| kernel.space.walk(&kernel.memory, page).unwrap();
    let (own_page, other_page) = (physical(page("data")), physical(page("one file")));
    let own_bio = bio("data");
    let other_bio = bio("one file");
    let journals = bio("journal");
    let mapping = |page| kernel.memory.u64(page + layout.page_mapping).unwrap();
    let inode = mapping(own_page) - layout.inode_data;
    let dentry = queue.get(inode + layout.inode_dentries) - layout.dentry_alias;
    let direct = queue.guest.linux.shape.direct;

    let (inbox, outbox) = (queue.reported("data"), queue.reported("one file"));
    assert_eq!((inbox.inode, outbox.inode), (131, 132));
    assert_eq!(inbox.path, "/srv/mail/inbox");

    // The page now belongs to another file, which the queue has cached too.
    let before = mapping(own_page);
    queue.set(direct + own_page + layout.page_mapping, mapping(other_page));
    let reported = queue.reported("data");
    assert_eq!((reported.inode, reported.path.as_str()), (132, outbox.path.as_str()));
    // The page is private memory of a process.
    queue.set(direct + own_page + layout.page_mapping, before | 1);
    assert_eq!(queue.reported("data").inode, 0);
    queue.set(direct + own_page + layout.page_mapping, before);
    assert_eq!(queue.reported("data"), inbox);

    // The file grows; its inode belongs to another file; it moves to the directory above.
    queue.set(inode + layout.inode_size, 77_777);
    assert_eq!(queue.reported("data").file_size, 77_777);
    queue.set(inode + layout.inode_number, 4711);
    assert_eq!(queue.reported("data").inode, 4711);
    let parent = queue.get(dentry + layout.dentry_parent);
    queue.set(dentry + layout.dentry_parent, queue.get(parent + layout.dentry_parent));
    assert_eq!(queue.reported("data").path, "/srv/inbox");
    // The file is renamed. The new name is at the same address, in the dentry itself.
    let name = dentry + layout.dentry_name;
    let (text, numbers) = (queue.get(name + layout.name_text), name + layout.name_hash);
    let before = (queue.get(text), queue.get(numbers));
    queue.set(text, u64::from_le_bytes(*b"inbox.1\0"));
    queue.set(numbers, 7 << 32 | 0x1234);
    assert_eq!(queue.reported("data").path, "/srv/inbox.1");
    // Another name of the same length, then no name.
    queue.set(text, u64::from_le_bytes(*b"inbox.2\0"));
    queue.set(numbers, 7 << 32 | 0x4321);
    assert_eq!(queue.reported("data").path, "/srv/inbox.2");
    let chain = dentry + layout.dentry_hash + 8;
    let chained = queue.get(chain);
    queue.set(chain, 0);
    assert_eq!(queue.reported("data").path, "/srv/inbox.2 (deleted)");
    queue.set(chain, chained);
    queue.set(text, before.0);
    queue.set(numbers, before.1);
    queue.set(inode + layout.inode_dentries, 0);
    assert_eq!(queue.reported("data").path, "");

    // Another group, then another completion function: a journal's.
    let group = layout.bio_group.unwrap();
    queue.set(own_bio + group, queue.get(other_bio + group));
    assert_eq!(queue.reported("data").cgroup, outbox.cgroup);
    queue.set(own_bio + group, 0);
    assert_eq!(queue.reported("data").cgroup, "");
    queue.set(own_bio + layout.bio_end, queue.get(journals + layout.bio_end));
    queue.set(own_bio + layout.bio_private, queue.get(journals + layout.bio_private));
    let reported = queue.reported("data");
    assert_eq!((reported.kind, reported.inode), (queue.reported("journal").kind, 0));
}

#[test]
fn mounts_and_unmounts_of_a_device_are_detected_immediately() {
    let mut queue = Queue::new();
    let kernel = queue.resolver.guest().kernel().unwrap();
    let layout = &kernel.layout;
    let page = kernel.page_of(queue.guest.linux.request("metadata").pieces[0].0);
    let page = kernel.space.walk(&kernel.memory, page).unwrap();
    let inode = kernel.memory.u64(page + layout.page_mapping).unwrap() - layout.inode_data;
    let device = inode - layout.block_device_inode.unwrap() + layout.block_device_of.unwrap();
    let file = kernel.page_of(queue.guest.linux.request("data").pieces[0].0);
    let file = kernel.space.walk(&kernel.memory, file).unwrap();
    let mapping = kernel.memory.u64(file + layout.page_mapping).unwrap();
    let super_block = queue.get(mapping - layout.inode_data + layout.inode_sb);
    let holder = device + layout.block_device_holder.unwrap();

    let mounted = queue.reported("metadata");
    assert_eq!((mounted.kind, mounted.file_system.as_str()), (Kind::Metadata, "ext4"));
    queue.set(super_block + layout.sb_device, 0);
    queue.set(holder, queue.guest.linux.shape.direct + 0x5000);
    let free = queue.reported("metadata");
    assert_eq!((free.kind, free.file_system.as_str()), (Kind::Device, ""));
    queue.set(super_block + layout.sb_device, device);
    queue.set(holder, super_block);
    assert_eq!(queue.reported("metadata"), mounted);
}

#[test]
fn bytes_that_the_guest_encrypts_or_compresses_are_marked() {
    let mut queue = Queue::new();
    for (name, is_transformed) in [
        ("data", false),
        ("dm-linear", false),
        ("dm-crypt", true),
        ("raid1 on dm-crypt", true),
        ("one file", false),
        ("btrfs compressed", true),
        ("data", false),
    ] {
        assert_eq!(queue.is_transformed(name), is_transformed, "{name}");
    }
}
