//! Where an interceptor finds what it needs in a kernel.

use fathom_intercept::{CallPlaces, MemoryFile, Places, REGIONS_MAX, RegionPlace};

use crate::kernel::Kernel;

impl Kernel {
    /// Where an interceptor finds the function that marks pages as dirty, and the process that
    /// calls it. `None` if the kernel does not have them, or its memory has too many regions.
    pub fn interception(&self) -> Option<Places> {
        let (layout, places) = (&self.layout, &self.places);
        let regions = self.memory.regions();
        if regions.len() > REGIONS_MAX {
            return None;
        }
        let regions = regions.iter().map(|region| {
            let (device, inode) = region.file_identity();
            RegionPlace {
                address: region.start,
                length: region.length,
                file: MemoryFile { device, inode },
                offset: region.file_offset,
            }
        });
        Some(Places {
            epoch: 0,
            page_dirtied: places.page_dirtied?,
            pages: places.pages,
            page_size: layout.page_size,
            direct: self.space.direct_start(),
            current: places.current?,
            task_leader: layout.task_leader?,
            task_process: layout.task_process,
            task_start: layout.task_start?,
            task_command: layout.task_command,
            task_flags: layout.task_flags?,
            stops_max: 0,
            calls: self.call_places().unwrap_or_default(),
            commands: Vec::new(),
            others: false,
            regions: regions.collect(),
        })
    }

    /// Where an interceptor notes system calls.
    fn call_places(&self) -> Option<CallPlaces> {
        let layout = &self.layout;
        let groups = layout.task_groups.and(layout.cgroup_self).and(layout.groups_default);
        let program = layout.task_memory.and(layout.memory_program);
        Some(CallPlaces {
            entry: self.places.system_call?,
            task_number: layout.task_number?,
            task_files: layout.task_files?,
            files_table: layout.files_table?,
            file_count: layout.file_count?,
            file_list: layout.file_list?,
            file_inode: layout.file_inode,
            file_position: layout.file_position?,
            inode_number: layout.inode_number,
            task_groups: if groups.is_some() { layout.task_groups? } else { 0 },
            groups_default: groups.unwrap_or(0),
            task_memory: if program.is_some() { layout.task_memory? } else { 0 },
            memory_program: program.unwrap_or(0),
        })
    }
}
