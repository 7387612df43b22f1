//! Memory with cycles, and requests with the greatest possible effort.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_insight::{ClassTable, Insight, Kind, Names};

use super::SyntheticGuest;
use crate::kernel::Kernel;
use crate::resolver::RequestView;
use crate::synthetic::{NamedFacts, READS_MAX, check, reads};

const PAGE: u64 = 4096;

/// A guest with further structures in the free part of its room.
struct Craft {
    guest: SyntheticGuest,
    kernel: Arc<Kernel>,
    next: u64,
}

impl Craft {
    fn new() -> Self {
        let guest = SyntheticGuest::roomy();
        let kernel = guest.guest().kernel().unwrap();
        let next = (guest.linux.used.0 + guest.linux.used.1).next_multiple_of(PAGE);
        Self { guest, kernel, next }
    }

    fn room(&mut self, length: u64) -> u64 {
        let room = self.next;
        self.next += length.next_multiple_of(64);
        self.guest.linux.shape.direct + room
    }

    fn set(&self, object: u64, place: u64, value: u64) {
        self.guest.store.write_u64(object - self.guest.linux.shape.direct + place, value);
    }

    fn get(&self, address: u64) -> u64 {
        self.kernel.u64(address).unwrap()
    }

    /// The address of the first bio of a request.
    fn bio_of(&self, name: &str) -> u64 {
        let header = self.guest.linux.request(name).view.header;
        let request = header - self.kernel.layout.request_size;
        self.guest.memory.u64(request + self.kernel.layout.request_bio).unwrap()
    }

    /// The completion function of a request's bio.
    fn end_of(&self, name: &str) -> u64 {
        self.get(self.bio_of(name) + self.kernel.layout.bio_end)
    }

    /// The inode and the dentry of the file of the request "data".
    fn inbox(&self) -> (u64, u64) {
        let layout = &self.kernel.layout;
        let page = self.kernel.page_of(self.guest.linux.request("data").pieces[0].0);
        let inode = self.get(page + layout.page_mapping) - layout.inode_data;
        (inode, self.get(inode + layout.inode_dentries) - layout.dentry_alias)
    }

    fn resolve(&self, view: &RequestView, pieces: &[(u64, u64)]) -> Vec<NamedFacts> {
        let mut resolver = self.guest.guest().resolver();
        let (mut insight, before, start) = (Insight::default(), reads::count(), Instant::now());
        let table = ClassTable::default();
        resolver.resolve(view, pieces.iter().copied(), &table, &mut insight);
        let count = reads::count() - before;
        assert!(count <= READS_MAX, "{count} reads");
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
        check(&insight, view.length, &self.guest.names);
        NamedFacts::all(view.length, &insight, &self.guest.names)
    }

    fn reported(&self, name: &str) -> NamedFacts {
        let request = self.guest.linux.request(name);
        self.resolve(&request.view, &request.pieces).remove(0)
    }

    fn bio(&mut self, sector: u64, size: u64, end: u64, private: u64) -> u64 {
        let layout = self.kernel.layout.clone();
        let bio = self.room(136);
        self.set(bio, layout.bio_sector, sector);
        self.set(bio, layout.bio_size, size);
        self.set(bio, layout.bio_end, end);
        self.set(bio, layout.bio_private, private);
        bio
    }

    /// A request with these bios, from sector 8 on.
    fn request(&mut self, bios: &[u64], length: u64) -> RequestView {
        let layout = self.kernel.layout.clone();
        for pair in bios.windows(2) {
            self.set(pair[0], layout.bio_next, pair[1]);
        }
        let request = self.room(layout.request_size + 64);
        self.set(request, layout.request_bio, bios[0]);
        self.set(request, layout.request_sector, 8);
        let place = request - self.guest.linux.shape.direct + layout.request_length;
        self.guest.store.write(place, &(length as u32).to_le_bytes());
        RequestView {
            header: request + layout.request_size - self.guest.linux.shape.direct,
            sector: 8,
            length,
            ..self.guest.linux.request("data").view
        }
    }
}

#[test]
fn bios_that_follow_themselves() {
    let mut craft = Craft::new();
    let end = craft.end_of("data");
    let page = craft.guest.linux.request("data").pieces[0].0;
    // Each bio has less than a sector, so that the next bio begins in the same sector.
    for size in [1, 511, 512, 0] {
        let bio = craft.bio(8, size, end, 0);
        craft.set(bio, craft.kernel.layout.bio_next, bio);
        let view = craft.request(&[bio], 1 << 20);
        let reported = craft.resolve(&view, &[(page, 1 << 20)]);
        assert_eq!(reported.last().unwrap().kind, Kind::Unknown, "{size}");
    }
}

#[test]
fn layers_above_themselves() {
    let craft = Craft::new();
    let layout = &craft.kernel.layout;
    let bio = craft.bio_of("split");
    craft.set(bio, layout.bio_private, bio);
    assert_eq!(craft.reported("split").path, "/srv/mail/inbox", "by its page");
    for name in ["raid1", "raid10"] {
        let bio = craft.bio_of(name);
        let holder = craft.get(bio + layout.bio_private);
        for place in [layout.raid1_master, layout.raid10_master].into_iter().flatten() {
            craft.set(holder, place, bio);
        }
        assert_eq!(craft.reported(name).path, "/srv/mail/inbox", "{name}");
    }
    let clone = craft.bio_of("md");
    let holder = clone - layout.md_account_clone.unwrap();
    craft.set(holder + layout.md_account_original.unwrap(), 0, clone);
    assert_eq!(craft.reported("md").path, "/srv/mail/inbox");
    let clone = craft.bio_of("dm-linear");
    let target = clone - layout.dm_io_clone.unwrap();
    let io = craft.get(target + layout.dm_target_io.unwrap());
    craft.set(io, layout.dm_io_original.unwrap(), clone);
    assert_eq!(craft.reported("dm-linear").path, "/srv/mail/inbox");
    // Two bios that are above each other.
    let other = craft.bio_of("raid1 on dm-crypt");
    let holder = craft.get(other + layout.bio_private);
    craft.set(holder, layout.dm_crypt_bio.unwrap(), clone);
    craft.set(io, layout.dm_io_original.unwrap(), other);
    assert_eq!(craft.reported("raid1 on dm-crypt").kind, Kind::Unknown);
}

#[test]
fn directories_in_themselves() {
    let craft = Craft::new();
    let layout = &craft.kernel.layout;
    let (_, name) = craft.inbox();
    let parent = craft.get(name + layout.dentry_parent);
    // Two directories in each other.
    craft.set(parent, layout.dentry_parent, name);
    let reported = craft.reported("data");
    assert_eq!((reported.kind, reported.inode, reported.path.as_str()), (Kind::Data, 131, ""));
    // A directory in itself is in no mounted tree, so its path is only its own name.
    craft.set(name, layout.dentry_parent, name);
    assert_eq!(craft.reported("data").path, "/inbox");
    craft.set(name, layout.dentry_parent, parent);
    craft.set(parent, layout.dentry_parent, parent);
    assert_eq!(craft.reported("data").path, "", "a tree without a root");
}

/// Nested dentries below the root of the file system of the request "data".
fn deep(craft: &mut Craft, count: usize, text: &str) -> u64 {
    let layout = craft.kernel.layout.clone();
    let (_, name) = craft.inbox();
    let mut parent = name;
    while craft.get(parent + layout.dentry_parent) != parent {
        parent = craft.get(parent + layout.dentry_parent);
    }
    let letters = craft.room(text.len() as u64 + 1);
    let place = letters - craft.guest.linux.shape.direct;
    craft.guest.store.write(place, text.as_bytes());
    for _ in 0..count {
        let entry = craft.room(192);
        craft.set(entry, layout.dentry_parent, parent);
        craft.set(entry, layout.dentry_hash + 8, 8);
        craft.set(entry, layout.dentry_name + layout.name_text, letters);
        let length =
            entry - craft.guest.linux.shape.direct + layout.dentry_name + layout.name_length;
        craft.guest.store.write(length, &(text.len() as u32).to_le_bytes());
        parent = entry;
    }
    parent
}

#[test]
fn the_length_of_paths_is_limited() {
    let mut craft = Craft::new();
    let place = craft.kernel.layout.dentry_parent;
    let (_, name) = craft.inbox();
    let long = "n".repeat(255);
    for (depth, text, is_reported) in
        [(127, "d", true), (128, "d", false), (15, long.as_str(), true), (16, long.as_str(), false)]
    {
        let parent = deep(&mut craft, depth, text);
        craft.set(name, place, parent);
        let reported = craft.reported("data");
        assert_eq!(!reported.path.is_empty(), is_reported, "{depth} times {} bytes", text.len());
        assert!(reported.path.len() <= Names::LENGTH_MAX);
        assert!(!is_reported || reported.path.ends_with("/inbox"));
    }
}

#[test]
fn groups_in_themselves() {
    let craft = Craft::new();
    let layout = &craft.kernel.layout;
    let group = craft.get(craft.bio_of("data") + layout.bio_group.unwrap());
    let blkcg = craft.get(group + layout.blkg_blkcg.unwrap());
    let state = blkcg + layout.blkcg_state.unwrap();
    let cgroup = craft.get(state + layout.css_cgroup.unwrap());
    let node = craft.get(cgroup + layout.cgroup_node.unwrap());
    craft.set(node, layout.node_parent.unwrap(), node);
    let reported = craft.reported("data");
    assert_eq!((reported.cgroup.as_str(), reported.path.as_str()), ("", "/srv/mail/inbox"));
}

#[test]
fn lists_with_cycles() {
    let craft = Craft::new();
    let layout = &craft.kernel.layout;
    // Super blocks: the second's link leads to the third, and the third's back to the second.
    let head = craft.kernel.places.super_blocks.unwrap();
    let first = craft.get(head);
    let second = craft.get(first);
    let third = craft.get(second);
    craft.set(third, 0, second);
    assert_eq!(craft.reported("device").kind, Kind::Unknown, "neither mounted nor unmounted");
    assert_eq!(craft.reported("metadata").kind, Kind::Metadata, "found before the circle");
    craft.set(second, 0, second);
    assert_eq!(craft.reported("device").kind, Kind::Unknown);
    // Tasks.
    let task = craft.kernel.places.first_task.unwrap();
    let first = craft.get(task + layout.task_list);
    let second = craft.get(first);
    craft.set(second, 0, first);
    assert_eq!(craft.kernel.tasks().len(), 2);
    craft.set(first, 0, first);
    assert_eq!(craft.kernel.tasks().len(), 1);
    // Modules.
    let head = craft.kernel.places.modules.unwrap();
    let entry = craft.kernel.space.translate(&craft.guest.memory, craft.get(head)).unwrap();
    craft.guest.store.write_u64(entry, craft.get(head));
    assert!(craft.kernel.modules_changed());
    assert_eq!(craft.kernel.read_again().unwrap().modules().len(), 1);
}

#[test]
fn pages_that_are_parts_of_themselves() {
    let craft = Craft::new();
    let layout = &craft.kernel.layout;
    let page = craft.kernel.page_of(craft.guest.linux.request("data").pieces[0].0);
    let place = craft.kernel.space.walk(&craft.guest.memory, page).unwrap();
    let before = craft.reported("data");
    for head in [page, page + layout.page_size, page + 1, u64::MAX - 1, 0, page + 8] {
        craft.guest.store.write_u64(place + layout.page_compound_head, head | 1);
        let reported = craft.reported("data");
        assert!(
            reported.path == before.path || reported.kind == Kind::Unknown,
            "{head:x}: {reported:?}"
        );
    }
}

/// The greatest possible effort: 512 bios, each below 15 others, each of a different file in a
/// directory of the greatest depth.
#[test]
fn the_greatest_effort() {
    let mut craft = Craft::new();
    let layout = craft.kernel.layout.clone();
    let (inode, name) = craft.inbox();
    let (chain, end) = (craft.end_of("split"), craft.end_of("data"));
    let parent = deep(&mut craft, 126, "d");
    let bytes = |craft: &Craft, address: u64, length: u64| {
        let mut bytes = vec![0; length as usize];
        craft.guest.memory.read(address - craft.guest.linux.shape.direct, &mut bytes).unwrap();
        bytes
    };
    let (inode_bytes, name_bytes) = (bytes(&craft, inode, 640), bytes(&craft, name, 192));
    let group = craft.get(craft.bio_of("data") + layout.bio_group.unwrap());
    let (mut bios, mut pieces) = (Vec::new(), Vec::new());
    for index in 0..512 {
        // A file.
        let own_name = craft.room(192);
        let own = craft.room(640);
        let direct = craft.guest.linux.shape.direct;
        craft.guest.store.write(own - direct, &inode_bytes);
        craft.guest.store.write(own_name - direct, &name_bytes);
        craft.set(own_name, layout.dentry_parent, parent);
        if let Some(place) = layout.dentry_inode {
            craft.set(own_name, place, own);
        }
        craft.set(own, layout.inode_number, 1000 + index);
        craft.set(own, layout.inode_data + layout.mapping_host, own);
        craft.set(own, layout.inode_dentries, own_name + layout.dentry_alias);
        // The file's page: the structure of a page at the end of the room, which belongs to no
        // other file.
        let page = craft.guest.linux.shape.room.0 + (6 << 20) - (index + 1) * PAGE;
        let structure = craft.kernel.page_of(page);
        let place = craft.kernel.space.walk(&craft.guest.memory, structure).unwrap();
        craft.guest.store.write_u64(place + layout.page_mapping, own + layout.inode_data);
        pieces.push((page, PAGE));
        // The file's bio, and the bios above it.
        let mut above = craft.bio(0, PAGE, end, 0);
        for _ in 0..14 {
            above = craft.bio(0, PAGE, chain, above);
        }
        let bio = craft.bio(8 + 8 * index, PAGE, chain, above);
        craft.set(bio, layout.bio_group.unwrap(), group);
        bios.push(bio);
    }
    assert!(craft.next < craft.guest.linux.shape.room.0 + (4 << 20), "pages have their own room");
    let view = craft.request(&bios, 512 * PAGE);
    let reported = craft.resolve(&view, &pieces);
    // The bytes beyond the limit of effort of one request are unknown.
    let known = reported.iter().filter(|reported| reported.path.ends_with("/inbox")).count();
    assert!((20..512).contains(&known), "{known}");
    assert!(reported.len() > 30);
}
