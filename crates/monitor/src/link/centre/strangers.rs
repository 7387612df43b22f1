//! The connections whose hosts have not identified themselves yet: anybody can make them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};

use parking_lot::Mutex;

/// A connection of a host that is not known yet.
struct Stranger {
    number: u64,
    address: SocketAddr,
    stream: TcpStream,
}

/// See the module. The oldest one is first.
#[derive(Default)]
pub(super) struct Strangers(Mutex<(u64, Vec<Stranger>)>);

impl Strangers {
    /// Adds a connection. Returns its number.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub(super) fn add(&self, address: SocketAddr, stream: &TcpStream) -> io::Result<u64> {
        let stream = stream.try_clone()?;
        let mut all = self.0.lock();
        all.0 += 1;
        let number = all.0;
        all.1.push(Stranger { number, address, stream });
        Ok(number)
    }

    /// The host has identified itself, or its connection has ended.
    pub(super) fn remove(&self, number: u64) {
        self.0.lock().1.retain(|stranger| stranger.number != number);
    }

    pub(super) fn len(&self) -> usize {
        self.0.lock().1.len()
    }

    /// Ends the oldest connection of the address that has most of them, so that an address that
    /// takes all places takes them from itself first. Returns its address.
    pub(super) fn drop_oldest(&self) -> Option<SocketAddr> {
        let mut all = self.0.lock();
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for stranger in &all.1 {
            *counts.entry(stranger.address.ip()).or_default() += 1;
        }
        let most = counts.values().copied().max()?;
        let oldest = all.1.iter().position(|other| counts[&other.address.ip()] == most)?;
        let Stranger { address, stream, .. } = all.1.remove(oldest);
        // Its thread notices that, and ends.
        let _ = stream.shutdown(Shutdown::Both);
        Some(address)
    }
}
