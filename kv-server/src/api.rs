//! The OpenAI API as data: what requests mean, and what answers look like.

pub(crate) mod answer;
pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod json;
pub(crate) mod params;
