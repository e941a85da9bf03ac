select 'event' as kind, e.title, cast(e.starts as text) as at, e.place as more
from event e
where cast(e.starts as text) >= cast(:day as text)
union all
select 'task', t.title, cast(t.due as text), m.sender
from task t
left join mail m on m.id = t.about
where t.status = 'open' and cast(t.due as text) >= cast(:day as text)
order by 3, 1, 2
