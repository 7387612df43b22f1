//! Submits requests in a synthetic guest: bios, the structures above them, and the request itself.

use super::PAGE;
use super::answer::NamedFacts;
use super::builder::Builder;
use super::objects::SyntheticGroup;
use super::scene::SyntheticRequest;
use crate::resolver::RequestView;

/// The members of a bio.
#[derive(Clone, Copy, Default)]
pub(super) struct Bio {
    /// The address; 0 for new room.
    pub(super) address: u64,
    pub(super) end: &'static str,
    pub(super) private: u64,
    /// The list of the bio's pieces of memory, for layers that copy.
    pub(super) vectors: u64,
    pub(super) size: u64,
    pub(super) group: Option<SyntheticGroup>,
    /// The `block_device` of the bio.
    pub(super) device: u64,
}

pub(super) struct Stage<'b, 's> {
    pub(super) builder: &'b mut Builder<'s>,
    pub(super) queue: u64,
    pub(super) sector: u64,
    pub(super) requests: Vec<SyntheticRequest>,
}

impl Stage<'_, '_> {
    /// Writes a bio of the next request. Returns its address.
    pub(super) fn bio(&mut self, bio: &Bio, sector: u64, next: u64) -> u64 {
        let builder = &mut *self.builder;
        let address = if bio.address == 0 { builder.make("bio") } else { bio.address };
        let end = builder.function(bio.end);
        builder.set(address, "bio.bi_next", next);
        builder.set(address, "bio.bi_iter.bi_sector", sector);
        builder.set_u32(address, "bio.bi_iter.bi_size", bio.size as u32);
        builder.set(address, "bio.bi_end_io", end);
        builder.set(address, "bio.bi_private", bio.private);
        builder.set(address, "bio.bi_blkg", bio.group.map_or(0, |group| group.block));
        builder.set(address, "bio.bi_io_vec", bio.vectors);
        builder.set(address, "bio.bi_bdev", bio.device);
        address
    }

    /// A bio of a layer above, to which the submitted bio leads.
    pub(super) fn above(&mut self, bio: &Bio) -> u64 {
        // At another place on another device.
        self.bio(bio, 77_777, 0)
    }

    /// A list of pieces of memory.
    pub(super) fn vectors(&mut self, pages: &[u64]) -> u64 {
        let builder = &mut *self.builder;
        let room = builder.room(16 * pages.len() as u64, 64);
        let vectors = builder.direct(room);
        for (index, page) in pages.iter().enumerate() {
            let (vector, page) = (vectors + 16 * index as u64, builder.page(*page));
            builder.set(vector, "bio_vec.bv_page", page);
            builder.set_u32(vector, "bio_vec.bv_len", PAGE as u32);
        }
        vectors
    }

    /// Submits a request with these bios.
    pub(super) fn submit(
        &mut self,
        name: &'static str,
        flags: u32,
        bios: &[Bio],
        pieces: &[(u64, u64)],
        truth: &[NamedFacts],
    ) {
        let length = bios.iter().map(|bio| bio.size).sum();
        let first = self.sector;
        let mut sector = first + length / 512;
        let mut next = 0;
        for bio in bios.iter().rev() {
            sector -= bio.size / 512;
            next = self.bio(bio, sector, next);
        }
        let builder = &mut *self.builder;
        // The driver's part follows the request, and begins with the header.
        let room = builder.room(builder.types.size("request") + 64, 64);
        let request = builder.direct(room);
        builder.set(request, "request.q", self.queue);
        builder.set_u32(request, "request.cmd_flags", flags | 1);
        builder.set_u32(request, "request.__data_len", length as u32);
        builder.set(request, "request.__sector", first);
        builder.set(request, "request.bio", next);
        let header = room + builder.types.size("request");
        builder.store.write(header, &1_u32.to_le_bytes());
        builder.store.write_u64(header + 8, first);
        self.sector += 10_000;
        let view = RequestView {
            header,
            sector: first,
            length,
            carries_data: !pieces.is_empty(),
            is_write: true,
            now_ns: 0,
        };
        let mut truth = truth.to_vec();
        if let [only] = &mut truth[..] {
            only.length = length;
        }
        self.requests.push(SyntheticRequest { name, view, pieces: pieces.to_vec(), truth });
    }

    /// Submits a request with one bio and one page.
    pub(super) fn one(&mut self, name: &'static str, bio: Bio, page: u64, truth: &NamedFacts) {
        let bio = Bio { size: PAGE, ..bio };
        self.submit(name, 0, &[bio], &[(page, PAGE)], std::slice::from_ref(truth));
    }

    /// A structure with one pointer.
    pub(super) fn holder(
        &mut self,
        structure: &'static str,
        member: &'static str,
        target: u64,
    ) -> u64 {
        let holder = self.builder.make(structure);
        self.builder.set(holder, member, target);
        holder
    }

    /// The bio with which device mapper replaces `original`.
    pub(super) fn dm_clone(&mut self, original: u64, bio: Bio) -> Bio {
        let io = self.holder("dm_io", "dm_io.orig_bio", original);
        let target = self.holder("dm_target_io", "dm_target_io.io", io);
        Bio { address: self.builder.at(target, "dm_target_io.clone"), ..bio }
    }

    /// The bio with which md replaces `original`: it is embedded in a structure that refers to
    /// `original`. Up to 7.1, the bio also has the address of the structure.
    pub(super) fn md_clone(&mut self, original: u64, bio: Bio) -> Bio {
        let [structure, end, original_of, clone] = if self.builder.shape.recent {
            ["md_io_clone", "md_end_clone_io", "md_io_clone.orig_bio", "md_io_clone.bio_clone"]
        } else {
            ["md_io_acct", "md_end_io_acct", "md_io_acct.orig_bio", "md_io_acct.bio_clone"]
        };
        let holder = self.holder(structure, original_of, original);
        let private = if self.builder.shape.seven { 0 } else { holder };
        Bio { address: self.builder.at(holder, clone), end, private, ..bio }
    }

    /// A bio of a buffer. The completion function is the buffer's; from 7.2 on, the bio's.
    pub(super) fn of_buffer(&mut self, end: &'static str, bio: Bio) -> Bio {
        let buffer = self.builder.make("buffer_head");
        self.with_buffer(buffer, end, bio)
    }

    pub(super) fn with_buffer(&mut self, buffer: u64, end: &'static str, bio: Bio) -> Bio {
        if self.builder.shape.seven {
            let end = match end {
                "end_buffer_write_sync" => "bh_end_write",
                "end_buffer_async_write" => "bh_end_async_write",
                other => other,
            };
            return Bio { end, private: buffer, ..bio };
        }
        let end = self.builder.function(end);
        self.builder.set(buffer, "buffer_head.b_end_io", end);
        Bio { end: "end_bio_bh_io_sync", private: buffer, ..bio }
    }
}
