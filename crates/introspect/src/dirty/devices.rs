//! The devices that will get the dirty pages, and the disks beneath them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::budget::Budget;
use super::{DirtyDevice, DiskObject, STEPS_MAX, TIME_MAX};
use crate::kernel::Kernel;

/// The most devices of a guest.
const DEVICES_MAX: usize = 4096;
/// The most writers of all devices: each control group that writes to a device has one there.
pub(super) const WRITERS_MAX: usize = 1 << 15;
/// The most mounted file systems that are examined.
const SUPER_BLOCKS_MAX: usize = 1024;
/// The most devices beneath each other, and beneath one device in all.
const LEVELS_MAX: usize = 8;
const LOWER_MAX: usize = 256;
/// The longest name of a device (`bdi.dev_name`).
const NAME_MAX: usize = 64;

/// The super blocks that were found last, by the address of their `backing_dev_info`. Otherwise
/// each count would read all super blocks of the guest. An address is checked before it is used.
#[derive(Debug, Default)]
pub(crate) struct KnownSuperBlocks([AtomicU64; 16]);

impl KnownSuperBlocks {
    fn slot(&self, bdi: u64) -> &AtomicU64 {
        // Objects of the kernel are at least 64 bytes apart, and large ones more.
        &self.0[((bdi >> 6 ^ bdi >> 12) % self.0.len() as u64) as usize]
    }
}

/// What a search for the disks beneath a device needs: the known disks, and its budget.
#[derive(Clone, Copy)]
struct Descent<'a> {
    disks: &'a [u64],
    budget: &'a Budget,
}

/// The disks beneath a device.
#[derive(Default)]
struct Lower {
    disks: Vec<usize>,
    is_elsewhere: bool,
    seen: Vec<u64>,
}

impl Kernel {
    /// The dirty pages of each device; `None` if a list is torn, or if the effort is too great.
    pub(super) fn devices(
        &self,
        offsets: &[u64],
        disks: &[Arc<DiskObject>],
        budget: &Budget,
    ) -> Option<Vec<DirtyDevice>> {
        let counts = self.layout.writer_counts?;
        let size = self.layout.counter_size?;
        let (dirty_index, writeback_index) =
            (self.dirty.writer_dirty?, self.dirty.writer_writeback?);
        let disks: Vec<u64> = disks.iter().map(|disk| self.checked_disk(disk.get())).collect();
        for disk in &disks {
            self.note_disk(*disk, budget);
        }
        self.note(self.dirty.bdi_list?, budget);
        let mut found = Vec::new();
        for bdi in self.bdis()? {
            let bdi = bdi?;
            budget.take(1)?;
            self.note_bdi(bdi, budget);
            let (mut dirty, mut writeback) = (0_i64, 0_i64);
            for writer in self.writers(bdi, WRITERS_MAX)? {
                let writer = writer?;
                let (list, owner) = (self.layout.writer_list?, self.layout.writer_bdi?);
                self.note(writer.wrapping_add(list), budget);
                self.note(writer.wrapping_add(owner), budget);
                let place = writer.wrapping_add(counts);
                let sum = |index: u64| {
                    self.split_counter(place.wrapping_add(index * size), offsets, budget)
                };
                // A page can be counted by one group and written by another.
                dirty = dirty.checked_add(sum(dirty_index)?)?;
                writeback = writeback.checked_add(sum(writeback_index)?)?;
            }
            let (dirty, writeback) = (self.pages_in_bytes(dirty)?, self.pages_in_bytes(writeback)?);
            let lower = self.disks_beneath(bdi, &disks, budget);
            if dirty == 0 && writeback == 0 && lower.disks.is_empty() {
                continue;
            }
            found.push(DirtyDevice {
                name: self.device_name(bdi)?,
                dirty,
                writeback,
                disks: lower.disks,
                lies_elsewhere: lower.is_elsewhere,
            });
        }
        // Otherwise the disks beneath the last device are not known.
        (!budget.is_over()).then_some(found)
    }

    /// Remembers what is read of a device.
    fn note_bdi(&self, bdi: u64, budget: &Budget) {
        if !budget.remembers() {
            return;
        }
        let layout = &self.layout;
        let places = [layout.bdi_list, layout.bdi_writers, layout.bdi_owner, layout.bdi_name];
        for place in places.iter().flatten() {
            self.note(bdi.wrapping_add(*place), budget);
        }
        if let Some(disk) = self.disk_of_bdi(bdi) {
            self.note_disk(disk, budget);
        }
    }

    /// Remembers what is read of a disk.
    fn note_disk(&self, disk: u64, budget: &Budget) {
        if !budget.remembers() {
            return;
        }
        let layout = &self.layout;
        let places = [layout.disk_device, layout.disk_bdi, Some(layout.disk_name)];
        for place in places.iter().flatten() {
            self.note(disk.wrapping_add(*place), budget);
        }
        let part = layout.disk_device.and_then(|place| self.pointer(disk.wrapping_add(place)));
        if let (Some(part), Some(place)) = (part, layout.block_device_disk) {
            self.note(part.wrapping_add(place), budget);
        }
    }

    /// The `backing_dev_info` of each device, by their addresses.
    pub(crate) fn bdis(&self) -> Option<impl Iterator<Item = Option<u64>> + '_> {
        let place = self.layout.bdi_list?;
        let links = self.links(self.dirty.bdi_list?, DEVICES_MAX);
        Some(links.map(move |link| Some(link?.wrapping_sub(place))))
    }

    /// The `bdi_writeback` of each group that writes to a device.
    pub(crate) fn writers(
        &self,
        bdi: u64,
        max: usize,
    ) -> Option<impl Iterator<Item = Option<u64>> + '_> {
        let (place, owner) = (self.layout.writer_list?, self.layout.writer_bdi?);
        let links = self.links(bdi.wrapping_add(self.layout.bdi_writers?), max);
        Some(links.map(move |link| {
            let writer = link?.wrapping_sub(place);
            // The two structures check each other.
            (self.u64(writer.wrapping_add(owner))? == bdi).then_some(writer)
        }))
    }

    /// The name of a device: that of its disk, or the one under which it is registered.
    pub(crate) fn device_name(&self, bdi: u64) -> Option<String> {
        match self.disk_of_bdi(bdi) {
            Some(disk) => self.text(disk.wrapping_add(self.layout.disk_name), 32),
            None => self.text(bdi.wrapping_add(self.layout.bdi_name?), NAME_MAX),
        }
    }

    /// The address of a `gendisk` if it is one now, otherwise 0.
    fn checked_disk(&self, disk: u64) -> u64 {
        let is_disk = || {
            let layout = &self.layout;
            let part = self.pointer(disk.wrapping_add(layout.disk_device?))?;
            let back = self.u64(part.wrapping_add(layout.block_device_disk?))?;
            Some(back == disk)
        };
        if disk != 0 && is_disk() == Some(true) { disk } else { 0 }
    }

    /// The `gendisk` that owns a `backing_dev_info`. `None` for those of file systems.
    fn disk_of_bdi(&self, bdi: u64) -> Option<u64> {
        let layout = &self.layout;
        let owner = self.pointer(bdi.wrapping_add(layout.bdi_owner?))?;
        let device = owner.wrapping_sub(layout.block_device_driver?);
        let disk = self.pointer(device.wrapping_add(layout.block_device_disk?))?;
        (self.u64(disk.wrapping_add(layout.disk_bdi?))? == bdi).then_some(disk)
    }

    /// The disks on which the file with its inode at an address lies, by their places in the list.
    pub fn disks_of_file(&self, inode: u64, disks: &[Arc<DiskObject>]) -> Vec<usize> {
        let budget = Budget::new(STEPS_MAX, TIME_MAX);
        let disks: Vec<u64> = disks.iter().map(|disk| self.checked_disk(disk.get())).collect();
        let bdi = || {
            let super_block = self.pointer(inode.wrapping_add(self.layout.inode_sb))?;
            self.pointer(super_block.wrapping_add(self.layout.sb_bdi?))
        };
        bdi().map_or_else(Vec::new, |bdi| self.disks_beneath(bdi, &disks, &budget).disks)
    }

    /// The disks beneath the device with this `backing_dev_info`.
    fn disks_beneath(&self, bdi: u64, disks: &[u64], budget: &Budget) -> Lower {
        let mut lower = Lower::default();
        let descent = Descent { disks, budget };
        let whole = match self.disk_of_bdi(bdi) {
            Some(disk) => self.follow_disk(disk, descent, 0, &mut lower),
            None => self.follow_file_system(bdi, descent, &mut lower),
        };
        // What cannot be followed lies somewhere else.
        lower.is_elsewhere |= whole.is_none();
        lower.disks.sort_unstable();
        lower
    }

    /// Follows a disk to the disks of which it consists.
    fn follow_disk(
        &self,
        disk: u64,
        descent: Descent<'_>,
        level: usize,
        lower: &mut Lower,
    ) -> Option<()> {
        descent.budget.take(1)?;
        if lower.seen.contains(&disk) {
            return Some(());
        }
        if level == LEVELS_MAX || lower.seen.len() == LOWER_MAX {
            return None;
        }
        lower.seen.push(disk);
        if let Some(place) = descent.disks.iter().position(|known| *known == disk) {
            lower.disks.push(place);
            return Some(());
        }
        let layout = &self.layout;
        let mut is_stacked = false;
        if let (Some(place), Some(list)) = (layout.disk_lower, layout.holder_list) {
            for link in self.links(disk.wrapping_add(place), LOWER_MAX) {
                let holder = link?.wrapping_sub(list);
                is_stacked = true;
                self.follow_device(self.held_device(holder)?, descent, level, lower)?;
            }
        }
        lower.is_elsewhere |= !is_stacked;
        Some(())
    }

    /// Follows a `block_device` to its disk.
    fn follow_device(
        &self,
        device: u64,
        descent: Descent<'_>,
        level: usize,
        lower: &mut Lower,
    ) -> Option<()> {
        let disk = self.pointer(device.wrapping_add(self.layout.block_device_disk?))?;
        self.follow_disk(disk, descent, level + 1, lower)
    }

    /// The `block_device` of a `bd_holder_disk`. From 6.2 on, it refers to the folder of the
    /// device's holders, which is below the device's own.
    fn held_device(&self, holder: u64) -> Option<u64> {
        let layout = &self.layout;
        if let Some(place) = layout.holder_device {
            return self.pointer(holder.wrapping_add(place));
        }
        let folder = self.pointer(holder.wrapping_add(layout.holder_directory?))?;
        let node = self.pointer(folder.wrapping_add(layout.directory_parent?))?;
        let device = node.wrapping_sub(layout.block_device_node?);
        let back = self.u64(device.wrapping_add(layout.block_device_directory?))?;
        (back == folder).then_some(device)
    }

    /// Follows a file system that has a `backing_dev_info` of its own to its devices.
    fn follow_file_system(&self, bdi: u64, descent: Descent<'_>, lower: &mut Lower) -> Option<()> {
        let layout = &self.layout;
        let super_block = self.super_block_with(bdi, descent.budget)?;
        let kind = self.pointer(super_block.wrapping_add(layout.sb_type))?;
        let name = self.text(self.pointer(kind.wrapping_add(layout.type_name))?, 32)?;
        if name != "btrfs" {
            let device = self.pointer(super_block.wrapping_add(layout.sb_device))?;
            return self.follow_device(device, descent, 0, lower);
        }
        let info = self.pointer(super_block.wrapping_add(layout.sb_private?))?;
        let devices = self.pointer(info.wrapping_add(layout.btrfs_info_devices?))?;
        let head = devices.wrapping_add(layout.btrfs_devices?);
        for link in self.links(head, LOWER_MAX) {
            descent.budget.take(1)?;
            let entry = link?.wrapping_sub(layout.btrfs_device_list?);
            // A missing device has no block device.
            match self.u64(entry.wrapping_add(layout.btrfs_device?))? {
                0 => lower.is_elsewhere = true,
                device => self.follow_device(device, descent, 0, lower)?,
            }
        }
        Some(())
    }

    /// The super block of the file system with this `backing_dev_info`.
    fn super_block_with(&self, bdi: u64, budget: &Budget) -> Option<u64> {
        let (place, list) = (self.layout.sb_bdi?, self.layout.sb_list);
        let slot = self.super_blocks.slot(bdi);
        let known = slot.load(Ordering::Relaxed);
        if known != 0 && self.is_super_block_with(known, bdi) == Some(true) {
            return Some(known);
        }
        for link in self.links(self.places.super_blocks?, SUPER_BLOCKS_MAX) {
            budget.take(1)?;
            let super_block = link?.wrapping_sub(list);
            if self.u64(super_block.wrapping_add(place))? == bdi {
                slot.store(super_block, Ordering::Relaxed);
                return Some(super_block);
            }
        }
        None
    }

    /// Whether there is still a super block with this `backing_dev_info` at an address: it is in
    /// the list, so that its neighbours refer to it.
    fn is_super_block_with(&self, super_block: u64, bdi: u64) -> Option<bool> {
        if self.u64(super_block.wrapping_add(self.layout.sb_bdi?))? != bdi {
            return Some(false);
        }
        let link = super_block.wrapping_add(self.layout.sb_list);
        let (next, previous) = (self.pointer(link)?, self.pointer(link.wrapping_add(8))?);
        Some(self.u64(next.wrapping_add(8))? == link && self.u64(previous)? == link)
    }
}
