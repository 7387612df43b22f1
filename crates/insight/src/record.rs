//! Records: events of fixed length, which rings carry as words.

/// An event of a stream: numbers of fixed length, without padding. Texts are numbers of
/// [`Names`](crate::Names).
pub trait Record: Copy + Default + std::fmt::Debug + PartialEq + Send + Sync + 'static {
    /// The record as 64-bit words.
    type Words: Copy + Default + AsRef<[u64]> + AsMut<[u64]>;

    /// The length of the record in 64-bit words.
    const WORDS: usize;

    /// The record as words: its fields in order, little-endian.
    fn to_words(self) -> Self::Words;

    /// The record of the words that [`to_words`](Self::to_words) returned.
    fn from_words(words: Self::Words) -> Self;
}

/// Declares a record: its fields, and its form as 64-bit words.
macro_rules! record {
    ($(#[$of_record:meta])* $record:ident { $($(#[$of_field:meta])* $field:ident: $type:ident,)* }) => {
        $(#[$of_record])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct $record {
            $($(#[$of_field])* pub $field: $type,)*
        }

        const _: () = assert!(size_of::<$record>() == <$record as $crate::Record>::WORDS * 8);

        impl $crate::Record for $record {
            type Words = [u64; (0 $(+ size_of::<$type>())*) / 8];

            const WORDS: usize = (0 $(+ size_of::<$type>())*) / 8;

            fn to_words(self) -> Self::Words {
                let mut bytes = [0; Self::WORDS * 8];
                let mut rest = &mut bytes[..];
                $(
                    let (place, after) = rest.split_at_mut(size_of::<$type>());
                    place.copy_from_slice(&self.$field.to_le_bytes());
                    rest = after;
                )*
                let _ = rest;
                std::array::from_fn(|index| {
                    let mut word = [0; 8];
                    word.copy_from_slice(&bytes[8 * index..][..8]);
                    u64::from_le_bytes(word)
                })
            }

            fn from_words(words: Self::Words) -> Self {
                let mut bytes = [0; Self::WORDS * 8];
                for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
                    place.copy_from_slice(&word.to_le_bytes());
                }
                let mut rest = &bytes[..];
                $(
                    let (place, after) = rest.split_at(size_of::<$type>());
                    let mut field = [0; size_of::<$type>()];
                    field.copy_from_slice(place);
                    let $field = $type::from_le_bytes(field);
                    rest = after;
                )*
                let _ = rest;
                Self { $($field,)* }
            }
        }
    };
}

pub(crate) use record;
