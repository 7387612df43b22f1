//! What a thread of another process has to find on its stack so that it makes one system call and
//! then goes on exactly where it was, whatever becomes of the process that has put it there.
//!
//! The thread's registers are set once, and never put back by the injector. They lead it through
//! instructions of its own C library:
//!
//! ```text
//! syscall; ret                 the call. Its result is in a register for a moment.
//!        └─ mov $15, %rax; syscall     what a handler of a signal returns to: rt_sigreturn
//! ```
//! `rt_sigreturn` loads all registers from the stack, where the injector has written those that the
//! thread had when it stopped. So the state between both is never one that somebody has to repair:
//! an injector that is killed before the registers are set has changed nothing, and one that is
//! killed after it is not needed any more.

use crate::trace::{Registers, extended_part_end};

/// `syscall; ret`.
pub(crate) const CALL: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`: `__restore_rt` of the C library.
pub(crate) const RETURN: &[u8] = &[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];

/// Below the stack pointer, a function may use this much.
const RED_ZONE: u64 = 128;
/// The kernel's `struct ucontext`, with the mask of signals.
const CONTEXT_BYTES: usize = 304;
/// The flags of a context: extended registers, a stack segment, restored as it is.
const CONTEXT_FLAGS: u64 = 1 | 2 | 4;
/// A mode of alternative stacks that does not exist: the thread's stays as it is.
const NO_STACK_MODE: u32 = 0x7f;
/// Where the software's part of the extended registers is, and what it says.
const SOFTWARE: usize = 464;
const MAGIC_BEGIN: u32 = 0x4650_5853;
const MAGIC_END: u32 = 0x4650_5845;
/// The legacy registers and the header.
const EXTENDED_BYTES_MIN: usize = 576;
/// The tiles of AMX, which a thread has only if it has asked for them.
const TILES: u64 = 3 << 17;

/// Where the two pieces of code are in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gadgets {
    /// The address of [`CALL`].
    pub call: u64,
    /// The address of [`RETURN`].
    pub back: u64,
}

/// A system call: its number and its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    /// The number.
    pub number: u64,
    /// The first three arguments; the others are 0.
    pub arguments: [u64; 3],
}

/// A stack and the registers that go with it.
#[derive(Debug)]
pub(crate) struct Detour {
    /// Where `bytes` belong.
    pub address: u64,
    /// What is put onto the stack.
    pub bytes: Vec<u8>,
    /// The registers to set when they are there.
    pub registers: Registers,
}

/// What a stopped thread was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a system call that it has to make again.
    Interrupted,
    /// At the end of a system call.
    Completed,
    /// Elsewhere: in its own code, or in a call that cannot be made again from outside. Later it is
    /// somewhere else.
    Unsuitable,
}

/// What a stopped thread with these registers was doing.
pub(crate) fn place(registers: &Registers) -> Place {
    // Of a program of 32 bits, the code segment is another.
    if registers.cs != 0x33 || (registers.orig_rax as i64) < 0 {
        return Place::Unsuitable;
    }
    match registers.rax as i64 {
        // ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND.
        -514..=-512 => Place::Interrupted,
        // ERESTART_RESTARTBLOCK: the kernel forgets on the way how to make it again.
        -516 => Place::Unsuitable,
        _ => Place::Completed,
    }
}

/// The way through `call` and back to what the thread was doing. `None` if its registers cannot be
/// put back from a stack.
pub(crate) fn detour(
    registers: &Registers,
    extended: &[u8],
    signal_mask: u64,
    gadgets: Gadgets,
    call: SystemCall,
) -> Option<Detour> {
    let mut back = *registers;
    match place(registers) {
        Place::Interrupted => {
            back.rax = registers.orig_rax;
            back.rip = registers.rip.wrapping_sub(2);
        }
        Place::Completed => {}
        Place::Unsuitable => return None,
    }
    let extended = software_part(extended)?;
    // Downwards: the extended registers at a multiple of 64, the context, the address to return to.
    let extended_at = registers.rsp.checked_sub(RED_ZONE + extended.len() as u64)? & !63;
    let context_at = extended_at.checked_sub(CONTEXT_BYTES as u64)?;
    let stack_at = context_at.checked_sub(8)?;
    let mut bytes = gadgets.back.to_ne_bytes().to_vec();
    bytes.extend(context(&back, extended_at, signal_mask));
    bytes.extend(extended);
    let mut set = *registers;
    set.rsp = stack_at;
    set.rip = gadgets.call;
    set.rax = call.number;
    [set.rdi, set.rsi, set.rdx] = call.arguments;
    [set.r10, set.r8, set.r9] = [0; 3];
    // Or else the kernel would make the interrupted call again, with these registers.
    set.orig_rax = u64::MAX;
    // The direction flag has to be clear in a call.
    set.eflags &= !0x400;
    Some(Detour { address: stack_at, bytes, registers: set })
}

/// The kernel's `struct ucontext`.
fn context(back: &Registers, extended_at: u64, signal_mask: u64) -> Vec<u8> {
    let segments = (back.cs & 0xffff) | (back.ss & 0xffff) << 48;
    let words = [
        CONTEXT_FLAGS,
        0,
        // The alternative stack: pointer, flags, size.
        0,
        u64::from(NO_STACK_MODE),
        0,
        back.r8,
        back.r9,
        back.r10,
        back.r11,
        back.r12,
        back.r13,
        back.r14,
        back.r15,
        back.rdi,
        back.rsi,
        back.rbp,
        back.rbx,
        back.rdx,
        back.rax,
        back.rcx,
        back.rsp,
        back.rip,
        back.eflags,
        segments,
        // Error, trap, old mask, CR2.
        0,
        0,
        0,
        0,
        extended_at,
    ];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    // Reserved.
    bytes.extend([0; 64]);
    bytes.extend(signal_mask.to_ne_bytes());
    bytes
}

/// The extended registers with the part that `rt_sigreturn` asks for. `None` if they are not
/// complete, or have tiles.
fn software_part(extended: &[u8]) -> Option<Vec<u8>> {
    if extended.len() < EXTENDED_BYTES_MIN {
        return None;
    }
    let word = |at: usize| Some(u64::from_ne_bytes(extended[at..at + 8].try_into().ok()?));
    // The kernel says here which parts the processor has, and in the header which are in use.
    let (parts, used) = (word(SOFTWARE)?, word(512)?);
    if used & TILES != 0 {
        return None;
    }
    let parts = parts & !TILES;
    let ends = (2..63).filter(|index| parts & 1 << index != 0).map(extended_part_end);
    let length = (ends.max().unwrap_or(0) as usize).max(EXTENDED_BYTES_MIN);
    if length > extended.len() {
        return None;
    }
    let mut bytes = extended[..length].to_vec();
    let mut software = Vec::with_capacity(48);
    software.extend(MAGIC_BEGIN.to_ne_bytes());
    software.extend((length as u32 + 4).to_ne_bytes());
    software.extend(parts.to_ne_bytes());
    software.extend((length as u32).to_ne_bytes());
    software.resize(48, 0);
    bytes[SOFTWARE..SOFTWARE + 48].copy_from_slice(&software);
    bytes.extend(MAGIC_END.to_ne_bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers() -> Registers {
        Registers {
            r15: 15,
            r14: 14,
            r13: 13,
            r12: 12,
            rbp: 5,
            rbx: 3,
            r11: 11,
            r10: 10,
            r9: 9,
            r8: 8,
            rax: (-514_i64) as u64,
            rcx: 2,
            rdx: 4,
            rsi: 6,
            rdi: 7,
            orig_rax: 271,
            rip: 0x1002,
            cs: 0x33,
            eflags: 0x646,
            rsp: 0x7fff_0123,
            ss: 0x2b,
            fs_base: 0,
            gs_base: 0,
            ds: 0,
            es: 0,
            fs: 0,
            gs: 0,
        }
    }

    #[test]
    fn only_calls_that_can_be_made_again_are_left() {
        let mut found = registers();
        assert_eq!(place(&found), Place::Interrupted);
        found.rax = 3;
        assert_eq!(place(&found), Place::Completed);
        found.rax = (-516_i64) as u64;
        assert_eq!(place(&found), Place::Unsuitable);
        found.orig_rax = u64::MAX;
        found.rax = 0;
        assert_eq!(place(&found), Place::Unsuitable);
        found = Registers { cs: 0x23, ..registers() };
        assert_eq!(place(&found), Place::Unsuitable);
    }

    #[test]
    fn the_detour_lies_below_the_red_zone_and_leads_back() {
        let mut extended = vec![0xaa; 832];
        extended[SOFTWARE..SOFTWARE + 8].copy_from_slice(&7_u64.to_ne_bytes());
        extended[512..520].copy_from_slice(&7_u64.to_ne_bytes());
        let gadgets = Gadgets { call: 0xaaaa, back: 0xbbbb };
        let call = SystemCall { number: 16, arguments: [1, 2, 3] };
        let made = detour(&registers(), &extended, 0x55, gadgets, call).unwrap();
        let end = made.address + made.bytes.len() as u64;
        assert!(end <= registers().rsp - RED_ZONE, "{end:x}");
        assert_eq!((made.address + 8 + CONTEXT_BYTES as u64) % 64, 0);
        assert_eq!((made.registers.rsp, made.registers.rip), (made.address, 0xaaaa));
        assert_eq!((made.registers.rax, made.registers.rdi, made.registers.rdx), (16, 1, 3));
        assert_eq!(made.registers.eflags & 0x400, 0);
        let word = |at: usize| u64::from_ne_bytes(made.bytes[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), 0xbbbb);
        // The call that was interrupted is made again: its number, and two bytes before.
        let context = |index: usize| word(8 + index * 8);
        assert_eq!((context(18), context(21), context(22)), (271, 0x1000, 0x646));
        assert_eq!((context(20), context(28)), (registers().rsp, made.address + 8 + 304));
        assert_eq!(word(8 + 296), 0x55);
        // Tiles cannot be put back, and neither can half of the registers.
        extended[512..520].copy_from_slice(&(1_u64 << 18).to_ne_bytes());
        assert!(detour(&registers(), &extended, 0, gadgets, call).is_none());
        assert!(detour(&registers(), &[0; 512], 0, gadgets, call).is_none());
    }
}
