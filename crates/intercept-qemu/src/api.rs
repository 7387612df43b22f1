//! The functions of QEMU and `GLib` that the plugin uses, looked up when it is loaded.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `GLib`'s array of bytes.
#[repr(C)]
pub struct ByteArray {
    data: *mut u8,
    length: c_uint,
}

/// `GLib`'s array.
#[repr(C)]
struct Array {
    data: *mut c_char,
    length: c_uint,
}

/// QEMU's description of a register.
#[repr(C)]
struct RegisterDescription {
    handle: *mut c_void,
    name: *const c_char,
    feature: *const c_char,
}

/// Called for a processor.
pub type ProcessorCall = extern "C" fn(u64, c_uint);
/// Called for a block of instructions that is translated.
pub type BlockCall = extern "C" fn(u64, *mut c_void);
/// Called when an instruction is executed.
pub type InstructionCall = extern "C" fn(c_uint, *mut c_void);
/// Called after all calls have been taken away.
pub type ResetCall = extern "C" fn(u64);

/// The flag of a call that reads registers.
const READS_REGISTERS: c_int = 1;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions.
        pub struct Api {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            /// Looks the functions up. The error is the name of a function that the program does
            /// not have.
            pub fn find() -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the name ends with a zero byte.
                        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr().cast()) };
                        if found.is_null() {
                            return Err(stringify!($name));
                        }
                        // SAFETY: the function of QEMU or GLib with this name has this type.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    g_byte_array_new: fn() -> *mut ByteArray;
    g_byte_array_set_size: fn(*mut ByteArray, c_uint) -> *mut ByteArray;
    g_array_free: fn(*mut Array, c_int) -> *mut c_char;
    qemu_plugin_get_registers: fn() -> *mut Array;
    qemu_plugin_read_register: fn(*mut c_void, *mut ByteArray) -> c_int;
    qemu_plugin_read_memory_vaddr: fn(u64, *mut ByteArray, usize) -> bool;
    qemu_plugin_register_vcpu_init_cb: fn(u64, ProcessorCall);
    qemu_plugin_register_vcpu_resume_cb: fn(u64, ProcessorCall);
    qemu_plugin_register_vcpu_tb_trans_cb: fn(u64, BlockCall);
    qemu_plugin_register_vcpu_insn_exec_cb: fn(*mut c_void, InstructionCall, c_int, *mut c_void);
    qemu_plugin_tb_n_insns: fn(*const c_void) -> usize;
    qemu_plugin_tb_get_insn: fn(*const c_void, usize) -> *mut c_void;
    qemu_plugin_insn_vaddr: fn(*const c_void) -> u64;
    qemu_plugin_reset: fn(u64, ResetCall);
}

thread_local! {
    /// The array of a processor's thread.
    static BYTES: std::cell::Cell<*mut ByteArray> = const { std::cell::Cell::new(std::ptr::null_mut()) };
}

/// The registers that the plugin reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Registers {
    /// The first argument of a function.
    pub first: usize,
    /// The stack.
    pub stack: usize,
    /// The base of the area of a processor.
    pub base: usize,
}

impl Api {
    fn bytes(&self) -> *mut ByteArray {
        BYTES.with(|bytes| {
            if bytes.get().is_null() {
                // SAFETY: a function without conditions. The array lives as long as the thread.
                bytes.set(unsafe { (self.g_byte_array_new)() });
            }
            // SAFETY: the array of this thread alone.
            unsafe { (self.g_byte_array_set_size)(bytes.get(), 0) }
        })
    }

    /// The first eight bytes of an array that a function of QEMU has filled.
    fn word(array: *const ByteArray) -> u64 {
        // SAFETY: GLib keeps the length of its data.
        let bytes = unsafe {
            let length = ((*array).length as usize).min(8);
            if length == 0 { &[][..] } else { std::slice::from_raw_parts((*array).data, length) }
        };
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    /// The handles of the registers, for a call for a processor.
    pub fn registers(&self) -> Registers {
        let mut found = Registers::default();
        // SAFETY: the array that QEMU returns has descriptions, and is ours to free.
        unsafe {
            let array = (self.qemu_plugin_get_registers)();
            if array.is_null() {
                return found;
            }
            let all: *const RegisterDescription = (*array).data.cast_const().cast();
            for place in 0..(*array).length as usize {
                let description = &*all.add(place);
                match CStr::from_ptr(description.name).to_bytes() {
                    b"rdi" => found.first = description.handle as usize,
                    b"rsp" => found.stack = description.handle as usize,
                    b"gs_base" => found.base = description.handle as usize,
                    _ => {}
                }
            }
            (self.g_array_free)(array, 1);
        }
        found
    }

    /// The value of a register, in a call that reads registers.
    pub fn register(&self, handle: usize) -> u64 {
        let bytes = self.bytes();
        // SAFETY: a handle of `registers`.
        unsafe { (self.qemu_plugin_read_register)(handle as *mut c_void, bytes) };
        Self::word(bytes)
    }

    /// Reads a virtual address of the guest into `words`, in a call. Returns whether it could.
    pub fn read_words(&self, address: u64, words: &mut [u64]) -> bool {
        let array = self.bytes();
        let length = 8 * words.len();
        // SAFETY: QEMU checks the address. GLib keeps the length of its data.
        let bytes = unsafe {
            if !(self.qemu_plugin_read_memory_vaddr)(address, array, length)
                || ((*array).length as usize) < length
            {
                return false;
            }
            std::slice::from_raw_parts((*array).data, length)
        };
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(bytes);
            *word = u64::from_le_bytes(eight);
        }
        true
    }

    /// The word at a virtual address of the guest, in a call.
    pub fn read(&self, address: u64) -> Option<u64> {
        let mut word = [0];
        self.read_words(address, &mut word).then_some(word[0])
    }

    /// Lets QEMU call the plugin.
    pub fn register_calls(
        &self,
        id: u64,
        init: ProcessorCall,
        resume: ProcessorCall,
        block: BlockCall,
    ) {
        // SAFETY: functions of this plugin, which stays loaded.
        unsafe {
            (self.qemu_plugin_register_vcpu_init_cb)(id, init);
            (self.qemu_plugin_register_vcpu_resume_cb)(id, resume);
            (self.qemu_plugin_register_vcpu_tb_trans_cb)(id, block);
        }
    }

    /// Takes all calls away, also from instructions that have been translated, and calls `then`.
    /// Only in a call.
    pub fn reset(&self, id: u64, then: ResetCall) {
        // SAFETY: as in `register_calls`.
        unsafe { (self.qemu_plugin_reset)(id, then) };
    }

    /// Lets QEMU make a call each time that the instruction of a block at its address is executed.
    /// The address 0 stands for none.
    pub fn hook(&self, block: *mut c_void, hooks: &[(u64, InstructionCall)]) {
        // SAFETY: the block is QEMU's, and is used only in the call for it.
        unsafe {
            for place in 0..(self.qemu_plugin_tb_n_insns)(block) {
                let instruction = (self.qemu_plugin_tb_get_insn)(block, place);
                let at = (self.qemu_plugin_insn_vaddr)(instruction);
                let hook = hooks.iter().find(|(address, _)| *address == at && at != 0);
                if let Some((_, call)) = hook {
                    (self.qemu_plugin_register_vcpu_insn_exec_cb)(
                        instruction,
                        *call,
                        READS_REGISTERS,
                        std::ptr::null_mut(),
                    );
                }
            }
        }
    }
}
