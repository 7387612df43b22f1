//! A guest whose disk has files that are not in one piece: a layer that gives each request its
//! insight, and a layer that notes what is read beneath.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::io;
use std::ops::Range;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Crossing, Kind, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome,
    Request,
};
use fathom_insight::{ClassTable, Facts};
use parking_lot::Mutex;

/// The size of a page of a file.
pub const PAGE: u64 = 4096;

/// The files of a disk.
#[derive(Clone, Debug)]
pub struct Files {
    /// The file of each page of the disk, and the number of the page in it.
    pages: Arc<Vec<Option<(u64, u64)>>>,
    /// The place of each page of each file, in pages of the disk.
    pub places: Arc<Vec<Vec<u64>>>,
}

impl Files {
    /// `count` files in fragments of `fragment` pages, which lie in random order on a disk of
    /// `pages` pages, all but the last fragment of which belong to files.
    pub fn scattered(pages: u64, count: usize, fragment: u64, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut fragments: Vec<u64> = (0..pages / fragment - 1).collect();
        random.shuffle(&mut fragments);
        let mut places = vec![Vec::new(); count];
        for (index, number) in fragments.into_iter().enumerate() {
            places[index % count].extend(number * fragment..(number + 1) * fragment);
        }
        Self::new(pages, places)
    }

    /// The files with these places.
    pub fn new(pages: u64, places: Vec<Vec<u64>>) -> Self {
        let mut of_pages = vec![None; pages as usize];
        for (inode, file) in (1..).zip(&places) {
            for (number, place) in (0..).zip(file) {
                of_pages[*place as usize] = Some((inode, number));
            }
        }
        Self { pages: Arc::new(of_pages), places: Arc::new(places) }
    }

    /// The ranges of the disk that have the pages `pages` of a file: offsets and lengths, in bytes.
    pub fn ranges(&self, file: usize, pages: Range<u64>) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let places = &self.places[file];
        for number in pages.start..pages.end.min(places.len() as u64) {
            let place = places[number as usize] * PAGE;
            match ranges.last_mut() {
                Some((offset, length)) if *offset + *length == place => *length += PAGE,
                _ => ranges.push((place, PAGE)),
            }
        }
        ranges
    }

    fn describe(&self, request: &mut Request) {
        if !request.operation.has_range() {
            return;
        }
        let mut at = request.offset;
        while at < request.offset + request.length {
            let length = (PAGE - at % PAGE).min(request.offset + request.length - at);
            let page = self.pages.get((at / PAGE) as usize).copied().flatten();
            let facts = |inode: u64| Facts {
                kind: Kind::Data,
                inode,
                file_size: self.places[inode as usize - 1].len() as u64 * PAGE,
                ..Facts::default()
            };
            match page {
                Some((inode, number)) => {
                    let offset = Some(number * PAGE + at % PAGE);
                    request.insight.push_at(length, facts(inode), offset);
                }
                None => request.insight.push(length, Facts::default()),
            }
            at += length;
        }
        request.insight.finish(&ClassTable::default());
    }
}

/// The layer that gives requests their insight.
impl Layer for Files {
    fn name(&self) -> &'static str {
        "files"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.clone()))
    }
}

impl LayerQueue for Files {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        self.describe(&mut request);
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

/// The layer that notes the ranges of reads: their offsets and lengths, in bytes.
#[derive(Clone, Debug, Default)]
pub struct Noted(pub Arc<Mutex<Vec<(u64, u64)>>>);

impl Noted {
    /// Takes the ranges noted so far.
    pub fn take(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Layer for Noted {
    fn name(&self) -> &'static str {
        "noted"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(self.clone()))
    }
}

impl LayerQueue for Noted {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if request.operation == Operation::Read {
            self.0.lock().push((request.offset, request.length));
        }
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}
