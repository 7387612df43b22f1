//! Tables of the configuration that belong to features.

use std::any::Any;
use std::fmt;

use fathom_options::{Origin, Problems, Section};

use super::Placed;
use super::check::Extent;
use super::table::{Document, Reading, Table};

/// A table of the file that belongs to a feature: `[NAME]` or `[[NAME]]`. Its keys are those of the
/// [`Section`].
pub(crate) trait FeatureSection:
    Section + Clone + fmt::Debug + PartialEq + Send + Sync + 'static
{
    /// Its name in the file.
    const NAME: &'static str;
    /// Whether there may be several.
    const IS_LIST: bool;

    /// Reads a table.
    fn read(table: Table<'_>, _reading: &Reading<'_>) -> Placed<Self> {
        table.read()
    }

    /// Reads the files whose content is a part of the tables.
    ///
    /// # Errors
    /// All problems that were found.
    fn load(_tables: &mut [Placed<Self>]) -> Result<(), Problems> {
        Ok(())
    }

    /// The parts of the page of documentation: their names and texts.
    #[cfg(test)]
    fn parts() -> Vec<(String, String)> {
        vec![super::page::part::<Self>()]
    }

    /// Finds problems of several tables together, and of what the tables name on this host.
    fn check_all(_tables: &[Placed<Self>], _extent: Extent, _problems: &mut Problems) {}
}

/// A [`FeatureSection`] without its type.
#[derive(Clone, Copy)]
pub(crate) struct SectionKind {
    read: fn(&mut Document<'_>, &Reading<'_>) -> Box<dyn Tables>,
    #[cfg(test)]
    pub(super) parts: fn() -> Vec<(String, String)>,
}

impl SectionKind {
    /// The kind of the tables that are read as `T`.
    pub(crate) const fn of<T: FeatureSection>() -> Self {
        Self {
            read: |document, reading| {
                let tables = if T::IS_LIST {
                    document.tables(T::NAME)
                } else {
                    document.table(T::NAME).into_iter().collect()
                };
                let read = tables.into_iter().map(|table| T::read(table, reading));
                Box::new(read.collect::<Vec<Placed<T>>>())
            },
            #[cfg(test)]
            parts: T::parts,
        }
    }
}

/// The tables of one kind.
trait Tables: Any + fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn load(&mut self) -> Result<(), Problems>;
    fn check(&self, extent: Extent, problems: &mut Problems);
    /// The places where they begin.
    fn origins(&self) -> Vec<Origin>;
    fn copy(&self) -> Box<dyn Tables>;
    fn equals(&self, other: &dyn Tables) -> bool;
    fn as_any(&self) -> &dyn Any;
}

impl<T: FeatureSection> Tables for Vec<Placed<T>> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn load(&mut self) -> Result<(), Problems> {
        T::load(self)
    }

    fn check(&self, extent: Extent, problems: &mut Problems) {
        T::check_all(self, extent, problems);
    }

    fn origins(&self) -> Vec<Origin> {
        self.iter().map(|placed| placed.origins.whole()).collect()
    }

    fn copy(&self) -> Box<dyn Tables> {
        Box::new(self.clone())
    }

    fn equals(&self, other: &dyn Tables) -> bool {
        other.as_any().downcast_ref() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The tables of all features, a list for each kind.
#[derive(Debug, Default)]
pub(super) struct Sections(Vec<Box<dyn Tables>>);

impl Sections {
    /// Takes the tables of each kind out of a document.
    pub(super) fn read(
        kinds: impl Iterator<Item = SectionKind>,
        document: &mut Document<'_>,
        reading: &Reading<'_>,
    ) -> Self {
        Self(kinds.map(|kind| (kind.read)(document, reading)).collect())
    }

    /// Those of one kind.
    pub(super) fn all<T: FeatureSection>(&self) -> &[Placed<T>] {
        let mut found = self.0.iter().filter_map(|tables| tables.as_any().downcast_ref());
        found.next().map_or(&[], |tables: &Vec<Placed<T>>| tables)
    }

    /// The number of tables with a name.
    pub(super) fn count(&self, name: &str) -> usize {
        let named = self.0.iter().filter(|tables| tables.name() == name);
        named.map(|tables| tables.origins().len()).sum()
    }

    /// Reads the files whose content is a part of tables. Returns all problems that were found.
    pub(super) fn load(&mut self) -> Problems {
        let mut problems = Problems::default();
        for tables in &mut self.0 {
            problems.0.extend(tables.load().err().unwrap_or_default().0);
        }
        problems
    }

    pub(super) fn check(&self, extent: Extent, problems: &mut Problems) {
        self.0.iter().for_each(|tables| tables.check(extent, problems));
    }

    /// The places where the tables begin.
    pub(super) fn origins(&self) -> impl Iterator<Item = Origin> {
        self.0.iter().flat_map(|tables| tables.origins())
    }
}

impl Clone for Sections {
    fn clone(&self) -> Self {
        Self(self.0.iter().map(|tables| tables.copy()).collect())
    }
}

impl PartialEq for Sections {
    fn eq(&self, other: &Self) -> bool {
        let mut pairs = self.0.iter().zip(&other.0);
        self.0.len() == other.0.len() && pairs.all(|(one, other)| one.equals(other.as_ref()))
    }
}
